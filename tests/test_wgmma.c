/* test_wgmma.c - the WGMMA engine, demanded by gmm_options.engine: linear products against fp64 and against the MMA
   engine, independence of groups, and what it declines. GPU. */
#include "linear_case.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"

static const gmm_op products[] = {GMM_OP_LINEAR_FWD, GMM_OP_LINEAR_DGRAD, GMM_OP_LINEAR_WGRAD};

/* ---------------------------------------------------------------------------------------------------- Helpers --- */

static void demand(lin_run *r, gmm_engine engine) {
    r->options.engine = engine;
    r->d.options = &r->options;
}

/* A context that chooses the engine (AUTO). */
static gmm_context *any_engine(void) {
    gmm_config config = T.config;
    config.engine = GMM_ENGINE_AUTO;
    return t_context(&config);
}
static const gmm_linear *demand_none(lin_run *r) {
    r->d.options = NULL;
    return &r->d;
}

/* Skips the case if the last call was refused because the GPU or the build lacks the engine. */
static void skip_without_engine(void) {
    const char *why = gmm_last_error(T.ctx);
    if (strstr(why, "compute capability") || strstr(why, "is not in this build"))
        t_skip("this GPU or build has no WGMMA engine: %s", why);
}

/* Builds a call that demands the engine. */
static void build(lin_run *r, const lin_spec *s) {
    gmm_info info = GMM_ZERO;
    lin_build(r, s);
    demand(r, GMM_ENGINE_WGMMA);
    if (gmm_linear_query(T.ctx, s->op, &r->d, &info) == GMM_E_UNSUPPORTED) skip_without_engine();
}

static size_t out_bytes(const lin_run *r) {
    return (size_t)(r->out.count * r->out.rows * r->out.cols * ref_bytes(r->out.dtype));
}

/* Restores the destination's bytes of before the first call. */
static void restore(lin_run *r) {
    const lin_spec *s = &r->spec;
    if (s->op == GMM_OP_LINEAR_WGRAD ? s->beta || (s->main_grad && !s->overwrite) : s->add) t_mat_put(&r->out);
    else
        for (int64_t g = 0; g < (r->out.form == T_PACKED ? 1 : r->out.count); g++) {
            const int64_t matrix = (r->out.rows - 1) * r->out.ld + r->out.cols;
            const int64_t all = r->out.form == T_PACKED ? (r->out.count - 1) * r->out.stride + matrix : matrix;
            t_poison(r->out.table[g], 0xFF, r->out.rows ? (size_t)(all * ref_bytes(r->out.dtype)) : 0);
        }
}

/* Integers: exact. Reals: within the bound. Both: the same bits with every tile, and the bits of MMA, which accumulates
   in the same steps. */
static void both_on(lin_spec s, int32_t sm_limit) {
    for (int i = 0; i < 2; i++) {
        lin_run r;
        const void *first;
        s.fill = i ? T_REALS : T_INTS;
        build(&r, &s);
        r.options.sm_limit = sm_limit;
        T_OK(t_linear(T.ctx, s.op, &r.d));
        lin_check(&r);
        first = t_mat_bits(&r.out);
        for (int32_t tile = 1; tile < 6; tile++) {
            restore(&r);
            r.options.tile = tile;
            T_OK(t_linear(T.ctx, s.op, &r.d));
            t_same("another tile", first, t_mat_bits(&r.out), out_bytes(&r));
        }
        restore(&r);
        demand(&r, GMM_ENGINE_MMA);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        t_same("MMA", first, t_mat_bits(&r.out), out_bytes(&r));
    }
}
#define both_on(...) T_CALL(both_on, __VA_ARGS__)
static void both(lin_spec s) { both_on(s, 0); }
#define both(...) T_CALL(both, __VA_ARGS__)

/* Case `arg` of operation x precision; every matrix suits the engine. */
static lin_spec spec_of(int arg, int32_t groups, const int64_t *sizes) {
    const gmm_dtype dtype = lin_dtype(1 + arg % 2);
    lin_spec s = {.op = products[arg / 2], .in = dtype, .out = dtype, .groups = groups, .K = 72, .N = 104,
                  .sizes = sizes};
    return s;
}

/* ---------------------------------------------------------------------------------------------------- Results --- */

static void shapes(int arg) {
    static const int64_t sizes[][5] = {{64, 128, 8, 16, 32}, {3, 277, 1, 0, 517}, {176, 192, 256, 177, 353}};
    static const int64_t features[][2] = {{8, 8}, {64, 64}, {200, 328}, {1032, 520}, {256, 2880}};
    for (int i = 0; i < 3; i++)
        for (int f = 0; f < 5; f++) {
            lin_spec s = spec_of(arg, 5, sizes[i]);
            s.K = features[f][0];
            s.N = features[f][1];
            both(s);
            s.out = GMM_F32;
            both(s);
        }
}

/* Groups so small that forward loads two stages at a time (small-M mode): with an odd number of stages the last one is
   loaded alone, and the next tile of a CTA begins at an odd stage of the pipeline. */
static void small_groups(int arg) {
    static const int64_t sizes[][6] = {{64, 1, 40, 0, 33, 16}, {128, 120, 127, 100, 97, 128}};
    for (int i = 0; i < 2; i++)
        for (int64_t stages = 1; stages <= 9; stages += 2) {
            lin_spec s = spec_of(arg, 6, sizes[i]);
            s.K = 64 * stages - 8;
            s.N = 520;
            both_on(s, 2);
        }
}

/* wgrad of skewed splits whose groups have 1024 rows and more in the mean: the balanced order of tiles, with more
   clusters than tiles and with few clusters. arg: of spec_of. */
static void skewed(int arg) {
    static const int64_t sizes[][4] = {{2100, 0, 60, 0}, {1, 2500, 2000, 0}};
    static const int32_t limits[] = {0, 4, 6};
    for (int i = 0; i < (device_emulated() ? 2 : 12); i++) {
        lin_spec s = spec_of(arg, 4, sizes[i % 2]);
        s.K = 136;
        s.N = 392;
        s.out = i % 2 ? s.in : GMM_F32;
        s.main_grad = i % 4 < 2;
        s.beta = i % 2;
        s.frozen = i / 4;
        s.overwrite = i / 2 % 2;
        both_on(s, limits[(i + 1) % 3]);
    }
}

/* The same with more tiles per group than clusters, more clusters than lanes, and 8 groups, two of them empty and two
   frozen. MMA gives the same bits in the order of groups. */
static void skewed_many_tiles(int arg) {
    static const int64_t sizes[8] = {1030, 1024, 0, 5000, 64, 2048, 0, 513};
    if (device_emulated()) t_skip("the emulator would take minutes");
    for (int i = 0; i < 2; i++) {
        lin_spec s = spec_of(arg, 8, sizes);
        lin_run r;
        const void *first;
        s.K = 2056;
        s.N = 2696;
        s.out = i ? s.in : GMM_F32;
        s.main_grad = s.beta = s.frozen = i == 0;
        s.fill = T_REALS;
        build(&r, &s);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        first = t_mat_bits(&r.out);
        restore(&r);
        demand(&r, GMM_ENGINE_MMA);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        t_same("MMA", first, t_mat_bits(&r.out), out_bytes(&r));
    }
}

/* Groups of every size around a tile boundary, with poisoned destinations; the ragged extent is M (rows) or, in wgrad,
   K. */
static void edges(int arg) {
    static const int64_t edge[] = {0, 96, 176, 192, 352, 384};
    int64_t *sizes = (int64_t *)t_host(131 * sizeof *sizes);
    lin_spec s = spec_of(arg / 6, 131, sizes);
    for (int64_t g = 0; g < 131; g++) sizes[g] = edge[arg % 6] + g;
    s.K = 40;
    s.N = 24;
    s.extra = 9;
    both(s);
}

/* The same for the extents that all groups have in common. */
static void feature_edges(int arg) {
    static const int64_t sizes[] = {33, 0, 190};
    for (int64_t n = 8; n <= 136; n += 8)
        for (int64_t edge = 0; edge <= 512; edge += 128) {
            lin_spec s = spec_of(arg, 3, sizes);
            s.K = 16 + (arg / 2 ? n + edge : 0);
            s.N = 16 + (arg / 2 == 1 ? 0 : n + edge);
            both(s);
        }
}

static void splits(int arg) {
    static const int64_t sizes[][6] = {{0, 40, 9, 1, 600, 0}, {5, 0, 0, 2, 8, 0}, {700, 7, 3, 2, 0, 31}, {0}};
    for (int i = 0; i < 4; i++)
        for (int split = LIN_I32; split <= LIN_OFFSETS64; split++) {
            lin_spec s = spec_of(arg, 6, sizes[i]);
            s.split = (lin_split)split;
            s.on_host = (i + split) % 2;
            s.extra = split % 3 * 70;
            s.tail = i % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
            both(s);
        }
}

static void forms(int arg) {
    static const int64_t sizes[] = {12, 0, 231, 1, 40};
    for (int form = 0; form < 9; form++) {
        lin_spec s = spec_of(arg, 5, sizes);
        s.pad = form % 2 * 8;
        s.gap = form % 3 ? 0 : 24;
        s.w = s.grad = (t_form)(form % 3);
        s.bias_form = (t_form)(form / 3);
        s.extra = 4;
        s.tail = form % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
        if (s.op == GMM_OP_LINEAR_FWD) s.bias = form % 2 ? GMM_F32 : s.in;
        s.on_host = form / 3 == 2;
        both(s);
    }
}

/* D at any address: rows, matrices and base addresses that are not multiples of 16 bytes, or only some of the matrices,
   computed by few CTAs one after another. */
static void odd_d(int arg) {
    static const int64_t sizes[] = {12, 0, 231, 1, 40};
    for (int out = 0; out < 2; out++)
        for (int add = 0; add < 2; add++)
            for (int pad = 1; pad < 8; pad++) {
                lin_spec s = spec_of(arg, 5, sizes);
                lin_run r;
                t_mat old;
                const int wgrad = s.op == GMM_OP_LINEAR_WGRAD;
                s.out = out ? GMM_F32 : s.in;
                s.add = add && !wgrad;
                s.main_grad = add && wgrad;
                s.fill = T_INTS;
                build(&r, &s);
                old = r.out;
                r.out = t_mat_make(old.dtype, old.count, old.rows, old.cols, pad, wgrad ? pad + pad / 4 : 0, T_PACKED,
                                   T_POISON);
                if (add) memcpy(r.out.v, old.v, (size_t)(old.count * old.rows * old.cols) * sizeof *old.v);
                restore(&r);
                r.before = t_mat_bits(&r.out);
                r.options.sm_limit = 2;
                for (int32_t tile = 1; tile < 6; tile++) {
                    restore(&r);
                    r.options.tile = tile;
                    T_OK(t_linear(T.ctx, s.op, &r.d));
                    lin_check(&r);
                }
                if (s.op != GMM_OP_LINEAR_FWD) continue;
                s.N = 96 + pad;
                s.bias = GMM_BF16;
                both(s);
            }
}

static void adds(int arg) {
    static const int64_t sizes[] = {12, 0, 331, 1, 40, 0, 9, 64};
    for (int mode = 0; mode < 12; mode++) {
        lin_spec s = spec_of(arg, 8, sizes);
        s.out = mode % 2 ? GMM_F32 : s.in;
        s.alpha = mode / 2 % 3;
        s.extra = 2;
        s.add = s.op != GMM_OP_LINEAR_WGRAD && mode / 6;
        if (s.op == GMM_OP_LINEAR_WGRAD) {
            s.main_grad = 1;
            s.overwrite = mode / 2 % 2;
            s.beta = mode / 6;
            s.frozen = mode / 3 % 2;
        }
        both(s);
    }
}

static void biases(int arg) {
    static const int64_t sizes[] = {12, 0, 331, 1, 40};
    for (int mode = 0; mode < 12; mode++) {
        lin_spec s = spec_of(arg, 5, sizes);
        s.bias = lin_dtype(mode % 3);
        s.alpha = mode % 2 ? 2 : 0;
        s.add = mode / 6;
        s.scale = mode / 3 % 2;
        s.out = mode % 4 ? s.in : GMM_F32;
        s.extra = 3;
        both(s);
    }
}

/* More groups than the group tables in shared memory hold. */
static void many_groups(int arg) {
    static const int32_t counts[] = {2, 33, 256, 257, 1024, 3001};
    for (int i = 0; i < 6; i++) {
        int64_t *sizes = (int64_t *)t_host((size_t)counts[i] * sizeof *sizes);
        lin_spec s = spec_of(arg, counts[i], sizes);
        for (int32_t g = 0; g < counts[i]; g++) sizes[g] = g % 7 == 2 ? 0 : t_int(0, 9);
        s.K = 24;
        s.N = 16;
        both(s);
    }
}

/* NaN in one group and in rows after the last one changes no other group. */
static void contained(int arg) {
    static const int64_t sizes[] = {100, 37, 130, 8};
    lin_spec s = spec_of(arg, 4, sizes);
    lin_run r;
    t_mat *m;
    s.extra = 300;
    s.fill = T_INTS;
    build(&r, &s);
    r.options.tile = 1 + arg % 5;
    m = s.op == GMM_OP_LINEAR_FWD ? &r.x : &r.dy;
    for (int64_t i = r.offsets[1] * m->cols; i < r.offsets[2] * m->cols; i++)
        m->v[i] = i % 2 ? (double)NAN : (double)INFINITY;
    t_mat_put(m);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    for (int64_t g = 0; g < 4; g++) {
        size_t bytes;
        const void *bits = lin_group_bits(&r, g, &bytes);
        for (int64_t i = 0; i < (int64_t)bytes / ref_bytes(s.out); i++)
            T_CHECK((g == 1) != !!isfinite(ref_load(s.out, bits, i)), "group %d element %lld", (int)g, (long long)i);
    }
    lin_check(&r);
}

/* ----------------------------------------------------------------------------------------------- Independence --- */

/* A group has the bits of a call with this group alone, whose tiles have other heights, and the same bits in a call of
   many groups, with any sm_limit and capacity, and with hints that choose other tiles. */
static void alone(int arg) {
    static const int64_t few[] = {177, 64, 0, 1, 200, 1000};
    static const int32_t limits[] = {1, 2, 3, 57, 100, 132, 1000};
    int64_t *many = (int64_t *)t_host(300 * sizeof *many);
    for (int g = 0; g < 300; g++) many[g] = g < 6 ? few[g] : 0;
    for (int i = 0; i < 2; i++) {
        lin_spec s = spec_of(arg, i ? 300 : 6, i ? many : few);
        lin_run r;
        const void *first;
        s.fill = T_REALS;
        s.K = 520;
        s.N = 136;
        s.extra = 40;
        build(&r, &s);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        lin_check(&r);
        first = t_mat_bits(&r.out);
        for (int l = 0; l < 7; l++) {
            r.options.sm_limit = limits[l];
            r.options.tile = l % 6;
            r.groups.rows_hint = l * 300;
            r.groups.capacity = r.capacity - 5 * l;
            restore(&r);
            T_OK(t_linear(T.ctx, s.op, &r.d));
            t_same("sm_limit, hint, capacity", first, t_mat_bits(&r.out), out_bytes(&r));
        }
        r.options.sm_limit = r.options.tile = 0;
        r.groups.rows_hint = 0;
        r.groups.capacity = r.capacity;
        if (i == 0) lin_alone(&r);
        else { /* the same call without the empty groups */
            const void *want[6];
            size_t bytes[6];
            for (int64_t g = 0; g < 6; g++) want[g] = lin_group_bits(&r, g, &bytes[g]);
            restore(&r);
            r.groups.count = 6;
            T_OK(t_linear(T.ctx, s.op, &r.d));
            for (int64_t g = 0; g < 6; g++)
                t_same("of 300 groups", want[g], lin_group_bits(&r, g, &bytes[g]), bytes[g]);
        }
    }
}

/* Replays of one graph of the three products with random splits equal eager calls. */
static void replays(int arg) {
    enum { G = 6, CAPACITY = 300, K = 72, N = 56, BATCH = 50 };
    const int rounds = T.rounds;
    const gmm_dtype dtype = (gmm_dtype)arg;
    const t_mat x = t_mat_in(dtype, 1, CAPACITY, K, T_REALS), dy = t_mat_in(dtype, 1, CAPACITY, N, T_REALS);
    const t_mat w = t_mat_make(dtype, G, N, K, 0, 0, T_TABLE, T_REALS);
    const t_mat y = t_mat_out(dtype, 1, CAPACITY, N), dx = t_mat_out(dtype, 1, CAPACITY, K);
    const t_mat dw = t_mat_out(GMM_F32, G, N, K);
    const t_mat *const outs[3] = {&y, &dx, &dw};
    gmm_groups groups = GMM_ZERO;
    gmm_options options = GMM_ZERO;
    gmm_grad grad = GMM_ZERO;
    gmm_linear d = GMM_ZERO;
    gmm_status s = GMM_OK;
    size_t workspace_bytes = 0, bytes[3], all = 0;
    int64_t splits[G];
    unsigned char *kept, *seen; /* outputs of a batch of calls: eager and replayed */
    void *workspace, *graph = NULL;
    const char *why;
    groups.count = G;
    groups.capacity = CAPACITY;
    groups.splits = t_alloc(sizeof splits);
    groups.dtype = GMM_I64;
    groups.tail = GMM_TAIL_ZERO;
    options.engine = GMM_ENGINE_WGMMA;
    grad.mat = &dw.mat;
    d.groups = &groups;
    d.options = &options;
    d.in_features = K;
    d.out_features = N;
    d.x = &x.mat;
    d.w = &w.mat;
    d.y = &y.mat;
    d.dy = &dy.mat;
    d.dx = &dx.mat;
    d.dw = &grad;
    for (int op = 0; op < 3; op++) {
        gmm_info info = GMM_ZERO;
        s = gmm_linear_query(T.ctx, products[op], &d, &info);
        if (s != GMM_OK) skip_without_engine();
        T_CHECK(s == GMM_OK, "%s", gmm_last_error(T.ctx));
        if (info.workspace_bytes > workspace_bytes) workspace_bytes = info.workspace_bytes;
        bytes[op] = (size_t)(outs[op]->count * outs[op]->rows * outs[op]->cols * ref_bytes(outs[op]->dtype));
        all += bytes[op];
    }
    kept = (unsigned char *)t_alloc(2 * BATCH * all);
    seen = (unsigned char *)t_host(2 * BATCH * all);
    workspace = t_workspace(workspace_bytes);
    memset(splits, 0, sizeof splits);
    t_upload((void *)(uintptr_t)groups.splits, splits, sizeof splits);
    why = device_begin_capture();
    T_CHECK(!why, "begin: %s", why);
    for (int op = 0; op < 3 && s == GMM_OK; op++)
        s = t_linear_functions[op](T.ctx, &d, workspace, workspace_bytes, T.stream);
    why = device_end_capture(&graph);
    T_CHECK(!why && s == GMM_OK, "capture: %s %s", why ? why : "", gmm_last_error(T.ctx));
    for (int i = 0; i < rounds; i++) {
        const int k = i % BATCH;
        int64_t left = CAPACITY;
        for (int g = 0; g < G; g++) {
            splits[g] = t_int(0, 3) ? t_int(0, t_int(0, left)) : 0;
            left -= splits[g];
        }
        t_upload((void *)(uintptr_t)groups.splits, splits, sizeof splits);
        for (int pass = 0; pass < 2; pass++) {
            unsigned char *to = kept + (size_t)(2 * k + pass) * all;
            for (int op = 0; op < 3; op++) t_poison(outs[op]->data, 0xFF, bytes[op]);
            if (pass) {
                why = device_replay(graph);
                T_CHECK(!why, "replay: %s", why);
            } else {
                for (int op = 0; op < 3 && s == GMM_OK; op++)
                    s = t_linear_functions[op](T.ctx, &d, workspace, workspace_bytes, T.stream);
                T_CHECK(s == GMM_OK, "%s", gmm_last_error(T.ctx));
            }
            for (int op = 0; op < 3; to += bytes[op++]) device_copy(to, outs[op]->data, bytes[op]);
        }
        if (k + 1 < BATCH && i + 1 < rounds) continue;
        t_wait();
        t_download(seen, kept, (size_t)(2 * (k + 1)) * all);
        for (int j = 0; j <= k; j++)
            t_same("replay", seen + (size_t)(2 * j) * all, seen + (size_t)(2 * j + 1) * all, all);
    }
    t_check_guards();
    device_graph_free(graph);
}

/* A kernel with two tiles chooses one on the device by the split: one graph with splits that suit either tile (groups
   of 256 rows 256x128, of 300 rows 160x256), with the bits that each tile alone gives. */
static void two_tiles(int arg) {
    static const int64_t first[] = {300, 300, 300, 300};
    static const int32_t sizes[][4] = {{300, 300, 300, 300}, {256, 256, 256, 256}, {3, 700, 0, 151}, {1, 1, 1, 1},
                                       {0, 0, 0, 0},         {289, 289, 289, 150}, {0, 0, 1024, 0}};
    lin_spec s = spec_of(arg, 4, first);
    gmm_info info = GMM_ZERO;
    void *workspace, *graph = NULL;
    const char *why;
    gmm_status status;
    lin_run r;
    s.fill = T_REALS;
    s.K = s.N = 512;
    s.split = LIN_I32;
    s.tail = GMM_TAIL_ZERO;
    build(&r, &s);
    r.options.sm_limit = 2;
    r.options.tile = 4;
    T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &info));
    T_CHECK(strstr(info.note, "tile 160 x 256 or 256 x 128, by the split"), "\"%s\"", info.note);
    workspace = t_workspace(info.workspace_bytes);
    why = device_begin_capture();
    T_CHECK(!why, "begin: %s", why);
    status = t_linear_functions[s.op - GMM_OP_LINEAR_FWD](T.ctx, &r.d, workspace, info.workspace_bytes, T.stream);
    why = device_end_capture(&graph);
    T_CHECK(!why && status == GMM_OK, "capture: %s %s", why ? why : "", gmm_last_error(T.ctx));
    for (int i = 0; i < 2 * (int)T_COUNT(sizes); i++) {
        const void *want = NULL;
        t_upload((void *)(uintptr_t)r.groups.splits, sizes[i % T_COUNT(sizes)], sizeof sizes[0]);
        for (int way = 0; way < 4; way++) { /* each tile alone, the choice, and the choice in a graph */
            restore(&r);
            r.options.tile = way == 0 ? 1 : way == 1 ? 2 : 4;
            if (way < 3) T_OK(t_linear(T.ctx, s.op, &r.d));
            else {
                why = device_replay(graph);
                T_CHECK(!why, "replay: %s", why);
                t_wait();
            }
            if (way == 0) want = t_mat_bits(&r.out);
            else t_same(way == 3 ? "replay" : "another tile", want, t_mat_bits(&r.out), out_bytes(&r));
        }
    }
    t_check_guards();
    device_graph_free(graph);
}

/* ---------------------------------------------------------------------------------------- Choice, and its log --- */

typedef struct lines { char created[512], warned[512], last[512]; } lines;
static void write_line(void *user, gmm_log_level level, const char *message) {
    lines *l = (lines *)user;
    (void)snprintf(level == GMM_LOG_INFO ? l->created : level == GMM_LOG_WARN && !l->warned[0] ? l->warned : l->last,
                   sizeof l->last, "%s", message);
}

/* On compute capability 9.0 AUTO chooses the engine; elsewhere, and where it declines, query and log name the
   reason. */
static void choice(int arg) {
    static const int64_t sizes[] = {30, 0, 50};
    lin_spec s = {.op = products[arg], .in = GMM_BF16, .out = GMM_BF16, .groups = 3, .K = 64, .N = 72, .sizes = sizes};
    const char *name = gmm_op_name(products[arg]);
    gmm_config config = T.config;
    gmm_info info = GMM_ZERO;
    gmm_context *ctx;
    lin_run r;
    lines l;
    memset(&l, 0, sizeof l);
    config.engine = GMM_ENGINE_AUTO;
    config.log.user = &l;
    config.log.level = GMM_LOG_TRACE;
    config.log.write = write_line;
    ctx = t_context(&config);
    s.fill = T_INTS;
    lin_build(&r, &s);
    T_OK_TEXT(gmm_linear_query(ctx, s.op, &r.d, &info), gmm_last_error(ctx));
    T_OK_TEXT(t_linear(ctx, s.op, &r.d), gmm_last_error(ctx));
    lin_check(&r);
    T_CHECK(strstr(l.created, "wgmma"), "\"%s\"", l.created);
    T_CHECK(strstr(l.last, name), "\"%s\" lacks %s", l.last, name);
    if (strstr(l.created, "compute capability 9.0") && strstr(l.created, "is not in this build")) {
        T_CHECK(strstr(l.warned, "wgmma") && strstr(l.warned, "compile for sm_90a"), "\"%s\"", l.warned);
        T_CHECK(strstr(info.note, "compile for sm_90a"), "\"%s\"", info.note);
    } else T_CHECK(!strstr(l.warned, "wgmma"), "\"%s\"", l.warned);
    if (!strstr(l.created, "compute capability 9.0") || strstr(l.created, "is not in this build")) {
        T_CHECK(info.engine == GMM_ENGINE_MMA && strstr(info.note, "wgmma "), "\"%s\"", info.note);
        T_CHECK(strstr(l.last, "served by mma") && strstr(l.last, "wgmma "), "\"%s\"", l.last);
        demand(&r, GMM_ENGINE_WGMMA);
        T_REFUSED_TEXT(GMM_E_UNSUPPORTED, t_linear(ctx, s.op, &r.d), gmm_last_error(ctx), "options.engine", "wgmma ",
                       NULL);
        return;
    }
    T_CHECK(info.engine == GMM_ENGINE_WGMMA && strstr(info.note, "tile "), "%s: \"%s\"", gmm_engine_name(info.engine),
            info.note);
    T_CHECK(strstr(l.last, "served by wgmma: tile "), "\"%s\"", l.last);
    s.in = s.out = GMM_F32;
    lin_build(&r, &s);
    T_OK_TEXT(gmm_linear_query(ctx, s.op, &r.d, &info), gmm_last_error(ctx));
    T_CHECK(info.engine == GMM_ENGINE_MMA && strstr(info.note, "wgmma multiplies no f32"), "\"%s\"", info.note);
    T_OK_TEXT(t_linear(ctx, s.op, &r.d), gmm_last_error(ctx));
    T_CHECK(strstr(l.last, "served by mma") && strstr(l.last, "wgmma multiplies no f32"), "\"%s\"", l.last);
}

/* Splits that an earlier kernel still changes while CTAs read them: the result has the bits of the final split, the
   first of splits[5][groups]; the others are there before. */
static void change_late(lin_spec s, const int64_t *splits) {
    const size_t bytes = (size_t)s.groups * sizeof *splits;
    s.sizes = splits;
    s.split = LIN_I64;
    s.fill = T_REALS;
    for (int32_t tile = 1; tile <= (s.op == GMM_OP_LINEAR_WGRAD ? 2 : 5); tile++) {
        const void *want = NULL, *const last = t_in(splits, bytes);
        void *const at = t_alloc(bytes); /* an earlier kernel writes it, so that it may not be frozen */
        lin_run r;
        build(&r, &s);
        t_upload(at, splits, bytes);
        r.groups.splits = at;
        r.options.tile = tile;
        for (int n = 0; n < 5; n++) {
            const int64_t *early = splits + n * s.groups;
            restore(&r);
            if (n && !device_early_reads(at, early, bytes)) {
                const char *why;
                t_upload(at, early, bytes);
                why = device_late_copy(at, last, 2 * (int)s.groups, (uint64_t)(n * 1700 + tile * 377));
                T_CHECK(!why, "late copy: %s", why);
            }
            T_OK(t_linear(T.ctx, s.op, &r.d));
            (void)device_early_reads(NULL, NULL, 0);
            if (n) t_same("another split before", want, t_mat_bits(&r.out), out_bytes(&r));
            else want = t_mat_bits(&r.out);
        }
    }
}
static void late_splits(int arg) {
    static const int64_t four[5][4] = {{177, 0, 50, 353}, {0, 0, 0, 580}, {580, 0, 0, 0}, {1, 300, 179, 100}, {0}};
    int64_t many[5][70];
    lin_spec s = spec_of(arg, 4, four[0]);
    s.K = 200;
    s.N = 520;
    change_late(s, four[0]);
    for (int64_t n = 0; n < 5; n++)
        for (int64_t g = 0; g < 70; g++) many[n][g] = n == 4 ? 0 : n == 3 && g < 69 ? g % 9 : g * (n + 7) % 9;
    change_late(spec_of(arg, 70, many[0]), many[0]);
}

/* options.tile numbers the tiles of the table, and rejects larger numbers. */
static void tiles(int arg) {
    static const int64_t sizes[] = {177, 0, 50};
    lin_spec s = spec_of(arg, 3, sizes);
    char seen[6][sizeof(((gmm_info *)0)->note)];
    const int32_t last = s.op == GMM_OP_LINEAR_WGRAD ? 2 : 5;
    lin_run r;
    s.fill = T_INTS;
    build(&r, &s);
    for (int32_t tile = 0; tile <= last; tile++) {
        gmm_info info = GMM_ZERO;
        r.options.tile = tile;
        T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &info));
        T_CHECK(strstr(info.note, "tile "), "\"%s\"", info.note);
        (void)snprintf(seen[tile], sizeof seen[tile], "%s", info.note);
        for (int32_t other = 1; other < tile; other++)
            T_CHECK(strcmp(seen[other], seen[tile]), "tiles %d and %d: \"%s\"", (int)other, (int)tile, seen[tile]);
    }
    r.options.tile = last + 1;
    {
        gmm_info info = GMM_ZERO;
        T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &info));
        T_CHECK(!strcmp(info.note, seen[0]), "\"%s\" is not \"%s\"", info.note, seen[0]);
    }
    r.options.tile = -3;
    T_REFUSED_TEXT(GMM_E_ARG, t_linear(T.ctx, s.op, &r.d), gmm_last_error(T.ctx), "options.tile", "-3", NULL);
}

/* The plan stores more rows per stage where a contraction has few stages. */
static void short_contractions(int arg) {
    static const int64_t lengths[] = {128, 256, 384, 448, 512, 1024, 4096};
    const gmm_mat mat = gmm_mat_packed(lin_dtype(1 + arg % 2), NULL);
    gmm_groups groups = GMM_ZERO;
    gmm_options options = GMM_ZERO;
    gmm_linear l = GMM_ZERO;
    groups.count = 64;
    groups.capacity = 64 * 2048;
    groups.dtype = GMM_I32;
    options.engine = GMM_ENGINE_WGMMA;
    l.groups = &groups;
    l.options = &options;
    l.x = l.w = l.y = l.dy = l.dx = &mat;
    l.in_features = l.out_features = 4096;
    for (int i = 0; i < T_COUNT(lengths); i++) {
        gmm_info info = GMM_ZERO;
        gmm_status s;
        *(products[arg / 2] == GMM_OP_LINEAR_FWD ? &l.in_features : &l.out_features) = lengths[i];
        s = gmm_linear_query(T.ctx, products[arg / 2], &l, &info);
        if (s == GMM_E_UNSUPPORTED) skip_without_engine();
        T_CHECK(s == GMM_OK, "%s", gmm_last_error(T.ctx));
        T_CHECK(!!strstr(info.note, "short contraction") == (lengths[i] < 512), "%d elements: \"%s\"",
                (int)lengths[i], info.note);
    }
}

/* The plan of an FP8 product leaves the tile to the device, which knows the split, but for few rows. options.tile names
   either tile. */
static void fp8_tiles(int arg) {
    static const struct { int64_t rows; int32_t tile; const char *note; } cases[] = {
        {16, 0, "tile 128 x 192,"}, {384, 0, "tile 192 x 128 or 128 x 192, by the split,"},
        {384, 1, "tile 192 x 128,"}, {384, 2, "tile 128 x 192,"},
        {4096, 0, "tile 192 x 128 or 128 x 192, by the split,"}};
    const gmm_recipe recipe = gmm_recipe_of(GMM_RECIPE_FP8_BLOCK);
    const gmm_mat y = gmm_mat_packed(GMM_BF16, NULL);
    const gmm_mat x = gmm_mat_quantized(&recipe.input, GMM_ROWWISE, NULL, NULL, NULL);
    const gmm_mat w = gmm_mat_quantized(&recipe.weight, GMM_ROWWISE, NULL, NULL, NULL);
    gmm_groups groups = GMM_ZERO;
    gmm_options options = GMM_ZERO;
    gmm_linear l = GMM_ZERO;
    (void)arg;
    groups.count = 64;
    groups.dtype = GMM_I32;
    options.engine = GMM_ENGINE_WGMMA;
    l.groups = &groups;
    l.options = &options;
    l.x = &x;
    l.w = &w;
    l.y = &y;
    l.in_features = 4096;
    l.out_features = 3072;
    for (int i = 0; i < T_COUNT(cases); i++) {
        gmm_info info = GMM_ZERO;
        gmm_status s;
        groups.capacity = 64 * cases[i].rows;
        options.tile = cases[i].tile;
        s = gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, &l, &info);
        if (s == GMM_E_UNSUPPORTED) skip_without_engine();
        T_CHECK(s == GMM_OK, "%s", gmm_last_error(T.ctx));
        T_CHECK(strstr(info.note, cases[i].note), "%d rows, tile %d: \"%s\"", (int)cases[i].rows,
                (int)cases[i].tile, info.note);
    }
    { /* 2^32 tiles of 128 rows: declined by a message, though prices are computed before */
        gmm_info info = GMM_ZERO;
        groups.count = 1;
        groups.capacity = (int64_t)1 << 39;
        l.in_features = l.out_features = 128;
        options.tile = 0;
        T_CHECK(gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, &l, &info) == GMM_E_UNSUPPORTED, "2^39 rows");
        T_CHECK(strstr(gmm_last_error(T.ctx), "takes at most"), "%s", gmm_last_error(T.ctx));
    }
}

/* An MLP under AUTO is composed of the engines that AUTO chooses for its parts. */
static void mlp_choice(int arg) {
    const gmm_mat mat = gmm_mat_packed(GMM_BF16, NULL);
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_grad grad = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_info part = GMM_ZERO, whole = GMM_ZERO;
    gmm_linear d = GMM_ZERO;
    gmm_context *ctx = any_engine();
    (void)arg;
    groups.count = 4;
    groups.capacity = 100;
    groups.dtype = GMM_I32;
    grad.mat = &mat;
    config.hidden = 64;
    config.ffn = 48;
    config.act.kind = GMM_ACT_SWIGLU;
    mlp.config = &config;
    mlp.groups = &groups;
    mlp.x = mlp.w1 = mlp.w2 = mlp.y = mlp.dy = mlp.dx = &mat;
    mlp.dw1 = mlp.dw2 = &grad;
    d.groups = &groups;
    d.in_features = 64;
    d.out_features = 96;
    d.x = d.w = d.y = &mat;
    T_OK_TEXT(gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &d, &part), gmm_last_error(ctx));
    for (int op = GMM_OP_MLP_FWD; op <= GMM_OP_MLP_BWD; op++) {
        T_OK_TEXT(gmm_mlp_query(ctx, (gmm_op)op, &mlp, &whole), gmm_last_error(ctx));
        T_CHECK(!!strstr(whole.note, "products by wgmma") == (part.engine == GMM_ENGINE_WGMMA), "\"%s\"", whole.note);
        T_CHECK(!strstr(part.note, "compile for sm_90a") || strstr(whole.note, "compile for sm_90a"), "\"%s\"",
                whole.note);
    }
}

/* Calls that the engine declines, each with its reason, before anything is written; AUTO serves all of them by MMA, in
   the workspace of a query without addresses. */
static void declines(int arg) {
    static const int64_t sizes[] = {12, 0, 31, 1, 40};
    enum { F32, CROSS, LD_X, LD_W, ADDRESS, STRIDE, HOST_TABLE, BGRAD, KINDS };
    static const char *const why[KINDS] = {
        "multiplies no f32", "makes no f16 from bf16", "x at multiples of 16 bytes, not ld 77",
        "w at multiples of 16 bytes, not ld 75", "a multiple of 16 bytes, not 0x", "not group_stride",
        "not table[1] 0x", "does not have this operation"
    };
    (void)arg;
    for (int i = 0; i < KINDS; i++) {
        lin_spec s = spec_of(1, 5, sizes);
        gmm_info info = GMM_ZERO;
        lin_run r;
        void *workspace;
        if (i == F32) s.in = s.out = GMM_F32;
        if (i == CROSS) s.out = GMM_F16;
        if (i == LD_X) s.pad = 5;
        if (i == LD_W) s.op = GMM_OP_LINEAR_DGRAD, s.K = 75;
        if (i == STRIDE) s.gap = 4;
        if (i == HOST_TABLE) s.w = T_TABLE_HOST;
        if (i == BGRAD) s.op = GMM_OP_LINEAR_BGRAD;
        s.fill = T_INTS;
        build(&r, &s);
        if (i == ADDRESS || i == HOST_TABLE) { /* the same rows at an address 2 bytes higher */
            t_mat *m = i == ADDRESS ? &r.x : &r.w;
            const int64_t group = i == ADDRESS ? 0 : 1, bytes = m->rows * m->cols * 2;
            char *moved = (char *)t_alloc_aligned((size_t)bytes + 16, 16) + 2;
            t_upload(moved, t_get(m->table[group], (size_t)bytes), (size_t)bytes);
            m->table[group] = moved;
            if (i == ADDRESS) m->mat.data = moved;
        }
        T_REFUSED(GMM_E_UNSUPPORTED, t_linear(T.ctx, s.op, &r.d), "options.engine", "wgmma", why[i], NULL);
        if (i == BGRAD) continue;
        {
            gmm_context *ctx = any_engine();
            const gmm_mat x = r.x.mat, w = r.w.mat;
            (void)demand_none(&r);
            r.x.mat.data = r.w.mat.data = NULL;
            r.w.mat.table = NULL;
            T_OK_TEXT(gmm_linear_query(ctx, s.op, &r.d, &info), gmm_last_error(ctx));
            r.x.mat = x;
            r.w.mat = w;
            if (i == HOST_TABLE) { /* the query gets the table as well */
                T_OK_TEXT(gmm_linear_query(ctx, s.op, &r.d, &info), gmm_last_error(ctx));
                T_CHECK(info.engine == GMM_ENGINE_WGMMA, "a query does not read tables");
            }
            workspace = t_workspace(info.workspace_bytes);
            T_OK_TEXT(i == LD_W ? gmm_linear_dgrad(ctx, &r.d, workspace, info.workspace_bytes, T.stream)
                                : gmm_linear_fwd(ctx, &r.d, workspace, info.workspace_bytes, T.stream),
                      gmm_last_error(ctx));
            lin_check(&r);
        }
    }
}

/* A misaligned address in a device table is found by the kernel: it sets a fault bit, and every other group is
   correct. */
static void device_table(int arg) {
    static const int64_t sizes[] = {120, 64, 31};
    lin_spec s = spec_of(arg, 3, sizes);
    lin_run r;
    uint32_t fault;
    s.w = T_TABLE;
    s.fill = T_INTS;
    build(&r, &s);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
    {
        const void *want[3];
        void *table[3];
        size_t bytes;
        for (int g = 0; g < 3; g++) want[g] = lin_group_bits(&r, g, &bytes);
        memcpy(table, r.w.table, sizeof table);
        table[1] = (char *)table[1] + 2;
        t_upload((void *)(uintptr_t)r.w.mat.table, table, sizeof table);
        restore(&r);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        t_download(&fault, r.fault, sizeof fault);
        T_CHECK(fault == GMM_FAULT_ADDRESS, "fault bits %x", fault);
        for (int g = 0; g < 3; g += 2) {
            const void *got = lin_group_bits(&r, g, &bytes);
            t_same("other groups", want[g], got, bytes);
        }
        r.groups.fault = NULL;
        T_OK(t_linear(T.ctx, s.op, &r.d));
    }
}
#endif

void tests_wgmma(void) {
#ifdef HAVE_CUDA
    for (int i = 0; i < 6; i++) {
        const char *op = gmm_op_name(products[i / 2]), *dtype = gmm_dtype_name(lin_dtype(1 + i % 2));
        static const int edge[] = {0, 96, 176, 192, 352, 384};
        t_add_gpu_once(shapes, i, "wgmma shapes %s %s", op, dtype);
        for (int k = 0; k < 6; k++)
            t_add_gpu_once(edges, 6 * i + k, "wgmma groups of %d to %d rows %s %s", edge[k], edge[k] + 130, op, dtype);
        if (i < 2) t_add_gpu_once(small_groups, i, "wgmma small groups %s %s", op, dtype);
        if (i > 3) t_add_gpu_once(skewed, i, "wgmma skewed splits %s %s", op, dtype);
        if (i > 3) t_add_gpu_once(skewed_many_tiles, i, "wgmma skewed splits, many tiles %s %s", op, dtype);
        t_add_gpu_once(feature_edges, i, "wgmma tails of features %s %s", op, dtype);
        t_add_gpu_once(splits, i, "wgmma empty groups, splits, tails %s %s", op, dtype);
        t_add_gpu_once(forms, i, "wgmma strides and tables %s %s", op, dtype);
        t_add_gpu_once(odd_d, i, "wgmma results at odd addresses %s %s", op, dtype);
        t_add_gpu_once(adds, i, "wgmma alpha, beta, frozen groups %s %s", op, dtype);
        t_add_gpu_once(many_groups, i, "wgmma up to 3001 groups %s %s", op, dtype);
        t_add_gpu_once(contained, i, "wgmma NaN of one group %s %s", op, dtype);
        t_add_gpu_once(alone, i, "wgmma group alone, other tiles, sm_limit, hint, capacity %s %s", op, dtype);
        t_add_gpu_once(tiles, i, "wgmma tiles by option %s %s", op, dtype);
        if (i < 4) t_add_gpu_once(short_contractions, i, "wgmma tile for short contractions %s %s", op, dtype);
        t_add_gpu_once(late_splits, i, "wgmma splits that change late %s %s", op, dtype);
        if (i < 2) t_add_gpu_once(biases, i, "wgmma bias %s", dtype);
        if (i < 2) t_add_gpu_once(replays, (int)lin_dtype(1 + i), "wgmma replays of a graph %s", dtype);
        if (i < 4) t_add_gpu_once(two_tiles, i, "wgmma tile by the split %s %s", op, dtype);
        if (i < 4) t_add_gpu_once(device_table, i, "wgmma odd address in a device table %s %s", op, dtype);
    }
    for (int i = 0; i < 3; i++) t_add_gpu_once(choice, i, "wgmma query and log %s", gmm_op_name(products[i]));
    t_add_gpu_once(fp8_tiles, 0, "wgmma tiles of FP8 products");
    t_add_gpu_once(mlp_choice, 0, "wgmma products of an MLP");
    t_add_gpu_once(declines, 0, "wgmma declines with a reason");
#endif
}
