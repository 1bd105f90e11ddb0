/* test_contracts.c - rules about operands of a call: overlapping memory is refused for every operation before anything
   is written, interleaved views that share no byte are accepted, and a faulty split is an error status where no fault
   word would report it. */
#include "linear_case.h"

#include <stdio.h>
#include <string.h>

static gmm_mat view(gmm_dtype dtype, const void *data, int64_t ld) {
    gmm_mat m = gmm_mat_packed(dtype, data);
    m.ld = ld;
    return m;
}
static void *past(const void *p, int64_t bytes) { return (void *)((uintptr_t)p + (uintptr_t)bytes); }

/* Expects the call to be refused with a message that names both overlapping operands. On a GPU, where buffers have no
   gaps, another operand may be named in place of the second. */
#define OVERLAP(call, function, first, second) \
    T_REFUSED(GMM_E_ARG, call, function ": ", first ": 0x", "overlaps ", T.gpu ? "0x" : second ", 0x", NULL)

/* ----------------------------------------------------------------------------------------------- Grouped linear --- */

static const int64_t sizes3[3] = { 2, 0, 3 };
static const int32_t counts3[3] = { 2, 0, 3 };

static void linear_overlaps(int arg) {
    enum { WS = 1 << 22 };
    lin_spec s = { .groups = 3, .K = 16, .N = 16, .sizes = sizes3, .bias = GMM_F32, .alpha = 2, .scale = 1,
                   .prob = 1, .index = LIN_PERMUTED };
    void *ws = t_workspace(WS);
    lin_run r;
    gmm_mat y;
    (void)arg;
    s.op = GMM_OP_LINEAR_FWD;
    lin_build(&r, &s);
#define FWD gmm_linear_fwd(T.ctx, &r.d, ws, WS, T.stream)
    T_OK(FWD);
    y = r.out.mat;
    r.out.mat.data = r.x.mat.data;
    OVERLAP(FWD, "gmm_linear_fwd", "y", "x");
    r.out.mat.data = past(r.x.mat.data, (5 * 16 - 1) * 4);
    OVERLAP(FWD, "gmm_linear_fwd", "y", "x");
    r.out.mat.data = r.w.mat.data;
    OVERLAP(FWD, "gmm_linear_fwd", "y", "w");
    r.out.mat.data = r.bias.mat.data;
    OVERLAP(FWD, "gmm_linear_fwd", "y", "bias");
    r.out.mat.data = (void *)(uintptr_t)r.d.bias_scale;
    OVERLAP(FWD, "gmm_linear_fwd", "y", "bias_scale");
    r.out.mat.data = (void *)(uintptr_t)r.d.prob;
    OVERLAP(FWD, "gmm_linear_fwd", "y", "prob");
    r.out.mat.data = past(r.d.x_index, 4 * 4);
    OVERLAP(FWD, "gmm_linear_fwd", "y", "x_index");
    r.out.mat.data = past(r.x.mat.data, (7 * 16 - 1) * 4); /* the last of index_rows rows */
    OVERLAP(FWD, "gmm_linear_fwd", "y", "x");
    r.out.mat.data = past(r.d.alpha, 2 * 4);
    OVERLAP(FWD, "gmm_linear_fwd", "y", "alpha");
    r.out.mat.data = past(r.groups.splits, 2 * 4);
    OVERLAP(FWD, "gmm_linear_fwd", "y", "groups.splits");
    r.out.mat.data = past(r.groups.fault, -4);
    OVERLAP(FWD, "gmm_linear_fwd", "groups.fault", "y");
    r.out.mat.data = ws;
    T_REFUSED(GMM_E_ARG, FWD, "gmm_linear_fwd: linear.y: ", "overlaps workspace, 0x", "T=5", NULL);
    r.out.mat = y;
    r.groups.fault = (uint32_t *)past(r.groups.splits, 4);
    OVERLAP(FWD, "gmm_linear_fwd", "groups.fault", "groups.splits");
    r.groups.fault = r.fault;
    {
        gmm_mat x = r.x.mat;
        r.x.mat.data = ws; /* the workspace counts as an output */
        OVERLAP(FWD, "gmm_linear_fwd", "workspace", "x");
        r.x.mat = x;
    }
#undef FWD
    s.op = GMM_OP_LINEAR_DGRAD;
    s.scale = 0;
    lin_build(&r, &s);
    r.out.mat.data = r.dy.mat.data;
    OVERLAP(gmm_linear_dgrad(T.ctx, &r.d, ws, WS, T.stream), "gmm_linear_dgrad", "dx", "dy");
    r.out.mat.data = (void *)(uintptr_t)r.d.dy_index;
    OVERLAP(gmm_linear_dgrad(T.ctx, &r.d, ws, WS, T.stream), "gmm_linear_dgrad", "dx", "dy_index");
    s.op = GMM_OP_LINEAR_BGRAD;
    s.prob = 0;
    s.scale = s.dscale = 1;
    lin_build(&r, &s);
    T_OK(gmm_linear_bgrad(T.ctx, &r.d, ws, WS, T.stream));
    r.d.d_bias_scale = (float *)(uintptr_t)r.d.bias_scale;
    OVERLAP(gmm_linear_bgrad(T.ctx, &r.d, ws, WS, T.stream), "gmm_linear_bgrad", "d_bias_scale", "bias_scale");
    r.d.d_bias_scale = (float *)r.out.mat.data;
    OVERLAP(gmm_linear_bgrad(T.ctx, &r.d, ws, WS, T.stream), "gmm_linear_bgrad", "db.mat", "d_bias_scale");
}

/* Destinations in tables: equal, partly overlapping, and over other operands. */
static void table_overlaps(int arg) {
    enum { WS = 1 << 22, SIZE = 16 * 16 * 4 };
    lin_spec s = { .op = GMM_OP_LINEAR_WGRAD, .groups = 3, .K = 16, .N = 16, .sizes = sizes3, .beta = 1, .frozen = 1 };
    void *ws = t_workspace(WS), *memory, *table[3];
    lin_run r;
    (void)arg;
    lin_build(&r, &s);
    memory = t_alloc(4 * SIZE);
    r.out.mat = gmm_mat_table(GMM_F32, table, (uint32_t)GMM_MAT_TABLE_ON_HOST);
#define WGRAD gmm_linear_wgrad(T.ctx, &r.d, ws, WS, T.stream)
    for (int g = 0; g < 3; g++) table[g] = past(memory, (2 - g) * SIZE); /* adjacent, at descending addresses */
    T_OK(WGRAD);
    table[0] = table[2];
    OVERLAP(WGRAD, "gmm_linear_wgrad", "dw.mat.table[0]", "dw.mat.table[2]");
    table[0] = past(memory, 2 * SIZE - 4);
    OVERLAP(WGRAD, "gmm_linear_wgrad", "dw.mat.table[1]", "dw.mat.table[0]");
    table[0] = past(memory, 3 * SIZE);
    table[1] = r.dy.mat.data;
    OVERLAP(WGRAD, "gmm_linear_wgrad", "dw.mat.table[1]", "dy");
    table[1] = past(r.grad.beta, -SIZE + 4);
    OVERLAP(WGRAD, "gmm_linear_wgrad", "dw.mat.table[1]", "dw.beta");
    table[1] = past(r.grad.frozen, -SIZE + 4 - (int64_t)((uintptr_t)r.grad.frozen % 4));
    OVERLAP(WGRAD, "gmm_linear_wgrad", "dw.mat.table[1]", "dw.frozen");
    table[1] = past(ws, 256);
    T_REFUSED(GMM_E_ARG, WGRAD, "gmm_linear_wgrad: ", "overlaps", NULL);
    if (!T.gpu) {
        table[1] = past(table, -SIZE + 8);
        OVERLAP(WGRAD, "gmm_linear_wgrad", "dw.mat.table[1]", "dw.mat.table");
    }
#undef WGRAD
}

/* So many experts that addresses are sorted in several pieces, in any order: an overlap is found wherever it is, and
   none is reported where every matrix is adjacent to two others. */
static void many_experts(int arg) {
    enum { G = 2600, K = 4, N = 2, SIZE = K * N * 4, WS = 1 << 24 };
    int64_t *sizes = (int64_t *)t_host(G * sizeof *sizes);
    lin_spec s = { .op = GMM_OP_LINEAR_WGRAD, .groups = G, .K = K, .N = N, .sizes = sizes };
    void **table = (void **)t_host(G * sizeof *table), *memory = t_alloc(G * SIZE), *ws = t_workspace(WS);
    char first[64], second[64];
    lin_run r;
    sizes[7] = 3;
    lin_build(&r, &s);
    for (int g = 0; g < G; g++) table[g] = past(memory, (int64_t)g * SIZE);
    for (int g = G - 1; arg && g > 0; g--) {
        const int64_t other = t_int(0, g);
        void *const kept = table[g];
        table[g] = table[other];
        table[other] = kept;
    }
    r.out.mat = gmm_mat_table(GMM_F32, table, (uint32_t)GMM_MAT_TABLE_ON_HOST);
    T_OK(gmm_linear_wgrad(T.ctx, &r.d, ws, WS, T.stream));
    for (int k = 0; k < 20; k++) {
        const int64_t a = t_int(0, G - 1), b = (a + 1 + t_int(0, G - 2)) % G, low = a < b ? a : b;
        void *const kept = table[a];
        table[a] = table[b];
        (void)snprintf(first, sizeof first, "dw.mat.table[%d]", (int)low);
        (void)snprintf(second, sizeof second, "dw.mat.table[%d]", (int)(a + b - low));
        T_REFUSED(GMM_E_ARG, gmm_linear_wgrad(T.ctx, &r.d, ws, WS, T.stream), first, second, NULL);
        table[a] = kept;
    }
}

/* x and y as columns of one buffer: no byte is shared, and the bits are those of separate buffers. */
static void column_views(int arg) {
    enum { T_ = 5, K = 16, N = 12, LD = K + N };
    lin_spec s = { .op = GMM_OP_LINEAR_FWD, .groups = 3, .K = K, .N = N, .sizes = sizes3 };
    float *host, *got, *all;
    lin_run r;
    gmm_mat x, y;
    (void)arg;
    lin_build(&r, &s);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    got = (float *)t_mat_bits(&r.out);
    all = (float *)t_alloc(T_ * LD * 4);
    host = (float *)t_host(T_ * LD * 4);
    for (int i = 0; i < T_ * LD; i++) host[i] = i % LD < K ? (float)r.x.v[i / LD * K + i % LD] : -7.0f;
    t_upload(all, host, T_ * LD * 4);
    x = view(GMM_F32, all, LD);
    y = view(GMM_F32, all + K, LD);
    r.d.x = &x;
    r.d.y = &y;
    T_OK(t_linear(T.ctx, s.op, &r.d));
    for (int i = 0; i < T_ * LD; i++)
        if (i % LD >= K) host[i] = got[i / LD * N + i % LD - K];
    t_same("columns of one buffer", t_get(all, T_ * LD * 4), host, T_ * LD * 4);
    y = view(GMM_F32, all + K - 1, LD); /* one column too far to the left */
    T_REFUSED(GMM_E_ARG, t_linear(T.ctx, s.op, &r.d), "linear.y", "overlaps linear.x", NULL);
    y = view(GMM_F32, all + LD + K - 1, LD);
    T_REFUSED(GMM_E_ARG, t_linear(T.ctx, s.op, &r.d), "linear.y", "overlaps linear.x", NULL);
}

/* -------------------------------------------------------------------------------------------- Against byte maps --- */

/* `count` matrices of rows x cols elements with random strides in a small buffer, and a map of the bytes that they
   cover. */
typedef struct boxes {
    gmm_mat mat;
    unsigned char byte[4096];
} boxes;
static void draw(boxes *b, gmm_dtype dtype, char *base, int64_t count, int64_t rows, int64_t cols) {
    const int64_t size = ref_bytes(dtype), ld = cols + t_int(0, 1) * t_int(0, 9);
    const int64_t least = (rows - 1) * ld + cols, stride = t_int(0, 1) ? rows * ld : least + t_int(0, 12);
    const int64_t start = t_int(0, 60) * 4;
    memset(b, 0, sizeof *b);
    b->mat = view(dtype, base + start, ld);
    if (count > 1) b->mat.group_stride = stride;
    for (int64_t i = 0; i < count * rows * cols * size; i++) {
        const int64_t element = i / size, m = element / (rows * cols), row = element / cols % rows;
        b->byte[start + (m * stride + row * ld + element % cols) * size + i % size] = 1;
    }
}
static int share(const boxes *a, const boxes *b) {
    for (size_t i = 0; i < sizeof a->byte; i++)
        if (a->byte[i] && b->byte[i]) return 1;
    return 0;
}

/* Refused exactly if a byte is shared: two random row strides, two random matrix strides, and tables. */
static void exact(int arg) {
    enum { TRIALS = 4000, WS = 1 << 16 };
    char *base = (char *)t_alloc(4096);
    void *ws = t_workspace(WS);
    int met = 0;
    for (int k = 0; k < TRIALS; k++) {
        const int64_t rows = t_int(1, 4), cols = t_int(1, 5), count = t_int(2, 4);
        gmm_status got;
        boxes a, b;
        int want;
        if (arg == 0) { /* one matrix each, elements of 4 and 2 bytes */
            gmm_conversion d = GMM_ZERO;
            draw(&a, GMM_F32, base, 1, rows, cols);
            draw(&b, GMM_BF16, base, 1, rows, cols);
            d.rows = rows;
            d.cols = cols;
            d.src = t_int(0, 1) ? &a.mat : &b.mat;
            d.dst = d.src == &a.mat ? &b.mat : &a.mat;
            got = gmm_convert(T.ctx, &d, NULL, 0, T.stream);
        } else {
            void *tables[2][4];
            gmm_glu d = GMM_ZERO;
            draw(&a, GMM_U8, base, count, 2 * rows, cols);
            draw(&b, GMM_U8, base, count, 2 * rows, cols);
            for (int i = 0; arg == 2 && i < 2; i++) { /* the same matrices as tables of addresses */
                gmm_mat *m = i ? &b.mat : &a.mat;
                const int64_t turn = t_int(0, 3);
                for (int64_t g = 0; g < count; g++)
                    tables[i][(g + turn) % count] = (char *)m->data + g * m->group_stride;
                m->data = NULL;
                m->table = tables[i];
                m->group_stride = 0;
                m->flags = (uint32_t)GMM_MAT_TABLE_ON_HOST;
            }
            d.axis = GMM_GLU_ROWS;
            d.block = 1;
            d.ffn = rows;
            d.count = count;
            d.cols = cols;
            d.src = &a.mat;
            d.dst = &b.mat;
            got = gmm_glu_interleave(T.ctx, &d, ws, WS, T.stream);
        }
        want = share(&a, &b);
        met += want;
        T_CHECK(got == (want ? GMM_E_ARG : GMM_OK), "trial %d: status %d, but %s byte is shared", k, (int)got,
                want ? "a" : "no");
    }
    T_CHECK(met > TRIALS / 8 && met < TRIALS * 7 / 8, "%d of %d trials overlap", met, (int)TRIALS);
}

/* --------------------------------------------------------------------------------------------- Other operations --- */

enum { WS = 1 << 20, ROWS = 6, COLS = 128 };
static gmm_groups groups3(const int32_t counts[3], uint32_t *fault) {
    gmm_groups g = GMM_ZERO;
    g.count = 3;
    g.capacity = ROWS;
    g.dtype = GMM_I32;
    g.splits = t_in(counts, 3 * sizeof *counts);
    g.fault = fault;
    return g;
}
static float *floats(int64_t n) { return (float *)t_alloc((size_t)n * sizeof(float)); }

static void act_overlaps(int arg) {
    gmm_groups groups = groups3(counts3, NULL);
    gmm_act act = gmm_act_of(GMM_ACT_PRESET_NEMOTRON);
    gmm_mat x = view(GMM_F32, floats(ROWS * COLS), 0), y = x, dy = view(GMM_F32, floats(ROWS * COLS), 0), dx = dy;
    gmm_activation d = GMM_ZERO;
    float *prob = floats(ROWS);
    void *ws = t_workspace(WS);
    (void)arg;
    d.ffn = COLS;
    d.groups = &groups;
    d.act = &act;
    d.x = &x;
    d.y = &y;
    d.prob = prob;
    OVERLAP(gmm_act_fwd(T.ctx, &d, ws, WS, T.stream), "gmm_act_fwd", "y", "x");
    d.y = NULL;
    d.dy = &dy;
    d.dx = &dx;
    OVERLAP(gmm_act_bwd(T.ctx, &d, ws, WS, T.stream), "gmm_act_bwd", "dx", "dy");
    d.dx = NULL;
    d.dprob = prob;
    OVERLAP(gmm_act_bwd(T.ctx, &d, ws, WS, T.stream), "gmm_act_bwd", "dprob", "prob");
}

static void move_overlaps(int arg) {
    gmm_groups groups = groups3(counts3, NULL);
    gmm_mat a = view(GMM_F32, floats(40 * COLS), 0), b = a;
    void *ws = t_workspace(WS), *table[2];
    (void)arg;
    {
        gmm_padding d = GMM_ZERO;
        d.align = 2;
        d.cols = COLS;
        d.padded_capacity = 12;
        d.groups = &groups;
        d.src = &a;
        d.dst = &b;
        OVERLAP(gmm_pad(T.ctx, &d, ws, WS, T.stream), "gmm_pad", "dst", "src");
        OVERLAP(gmm_unpad(T.ctx, &d, ws, WS, T.stream), "gmm_unpad", "dst", "src");
        b.data = floats(12 * COLS);
        T_OK(gmm_pad(T.ctx, &d, ws, WS, T.stream));
        d.sizes = (int32_t *)(uintptr_t)groups.splits;
        OVERLAP(gmm_pad(T.ctx, &d, ws, WS, T.stream), "gmm_pad", "sizes", "groups.splits");
        d.sizes = NULL;
        d.src_prob = d.dst_prob = floats(12);
        OVERLAP(gmm_pad(T.ctx, &d, ws, WS, T.stream), "gmm_pad", "dst_prob", "src_prob");
        b.data = a.data;
    }
    {
        gmm_glu d = GMM_ZERO;
        d.axis = GMM_GLU_COLUMNS;
        d.block = 1;
        d.ffn = COLS / 2;
        d.count = 6;
        d.src = &a;
        d.dst = &b;
        OVERLAP(gmm_glu_interleave(T.ctx, &d, ws, WS, T.stream), "gmm_glu_interleave", "dst", "src");
    }
    {
        gmm_accumulation d = GMM_ZERO;
        gmm_mat x = gmm_mat_table(GMM_F32, table, (uint32_t)GMM_MAT_TABLE_ON_HOST);
        d.count = 2;
        d.rows = 2;
        d.cols = COLS;
        d.scale = d.beta = 1.0f;
        d.x = &x;
        d.y = &a;
        table[0] = table[1] = floats(2 * COLS); /* an input table may name a matrix twice */
        T_OK(gmm_accumulate(T.ctx, &d, ws, WS, T.stream));
        table[1] = a.data; /* y is one of the inputs */
        T_OK(gmm_accumulate(T.ctx, &d, ws, WS, T.stream));
        a.ld = COLS + 1;
        OVERLAP(gmm_accumulate(T.ctx, &d, ws, WS, T.stream), "gmm_accumulate", "y", "x.table[1]");
        a.ld = 0;
        table[1] = past(a.data, 4);
        OVERLAP(gmm_accumulate(T.ctx, &d, ws, WS, T.stream), "gmm_accumulate", "y", "x.table[1]");
    }
    {
        gmm_conversion d = GMM_ZERO;
        d.rows = 4;
        d.cols = COLS;
        d.src = &a;
        d.dst = &b;
        OVERLAP(gmm_convert(T.ctx, &d, ws, WS, T.stream), "gmm_convert", "dst", "src");
    }
    OVERLAP(gmm_offsets(T.ctx, &groups, (int64_t *)past(groups.splits, -(int64_t)((uintptr_t)groups.splits % 8)),
                        T.stream), "gmm_offsets", "offsets", "groups.splits");
}

/* gmm_accumulate may write over one of its inputs: the same bits as with a separate output. */
static void accumulate_in_place(int arg) {
    enum { COUNT = 3, R = 7, C = 300 };
    const gmm_dtype dtype = lin_dtype(arg);
    const size_t one = (size_t)(R * C * ref_bytes(dtype));
    const t_mat x = t_mat_in(dtype, COUNT, R, C, T_REALS);
    char *bits = (char *)t_mat_bits(&x), *memory = (char *)t_alloc(COUNT * one), *beside = (char *)t_alloc(one);
    for (int k = 0; k < 2 * COUNT; k++) {
        char *const place = memory + (size_t)(k / 2) * one;
        gmm_mat all = view(dtype, memory, 0), y = view(dtype, beside, 0);
        gmm_accumulation d = GMM_ZERO;
        void *want;
        d.count = COUNT;
        d.rows = R;
        d.cols = C;
        d.x = &all;
        d.y = &y;
        d.scale = 0.3f;
        d.beta = k % 2 ? 0.7f : 0.0f;
        t_upload(memory, bits, COUNT * one);
        t_upload(beside, bits + (size_t)(k / 2) * one, one);
        T_OK(gmm_accumulate(T.ctx, &d, NULL, 0, T.stream));
        want = t_get(beside, one);
        y.data = place;
        T_OK(gmm_accumulate(T.ctx, &d, NULL, 0, T.stream));
        t_same("in place", t_get(place, one), want, one);
        y.data = place + ref_bytes(dtype);
        T_REFUSED(GMM_E_ARG, gmm_accumulate(T.ctx, &d, NULL, 0, T.stream), "gmm_accumulate: accumulation.y: ",
                  "overlaps accumulation.x", NULL);
    }
}

static void route_overlaps(int arg) {
    enum { TOKENS = 5, E = 4, K = 2, R = 12 };
    void *ws = t_workspace(WS);
    int32_t *ints = (int32_t *)t_alloc(64 * sizeof *ints);
    gmm_mat tokens = view(GMM_F32, floats(TOKENS * COLS), 0), rows = view(GMM_F32, floats(R * COLS), 0);
    (void)arg;
    t_poison(ints, 0, 64 * sizeof *ints);
    {
        gmm_route d = GMM_ZERO;
        gmm_mat logits = view(GMM_F32, floats(TOKENS * E), 0), dlogits = logits;
        d.experts = E;
        d.tokens = TOKENS;
        d.topk = K;
        d.logits = &logits;
        d.indices = ints;
        d.probs = (float *)ints;
        OVERLAP(gmm_topk_fwd(T.ctx, &d, ws, WS, T.stream), "gmm_topk_fwd", "indices", "probs");
        d.probs = floats(TOKENS * K);
        d.counts = ints + 16;
        d.offsets = ints + 19;
        OVERLAP(gmm_topk_fwd(T.ctx, &d, ws, WS, T.stream), "gmm_topk_fwd", "counts", "offsets");
        d.dlogits = &dlogits;
        OVERLAP(gmm_topk_bwd(T.ctx, &d, ws, WS, T.stream), "gmm_topk_bwd", "dlogits", "logits");
    }
    {
        gmm_permute d = GMM_ZERO;
        d.experts = E;
        d.tokens = TOKENS;
        d.capacity = R;
        d.hidden = COLS;
        d.topk = K;
        d.indices = ints;
        d.row_of = ints;
        OVERLAP(gmm_permute_map(T.ctx, &d, ws, WS, T.stream), "gmm_permute_map", "row_of", "indices");
        d.row_of = ints + 16;
        d.slot_of = ints + 32;
        d.sizes = ints + 40;
        OVERLAP(gmm_permute_map(T.ctx, &d, ws, WS, T.stream), "gmm_permute_map", "slot_of", "sizes");
        d.sizes = ints + 50;
        T_OK(gmm_permute_map(T.ctx, &d, ws, WS, T.stream));
        d.x = d.rows = &rows;
        OVERLAP(gmm_permute_fwd(T.ctx, &d, ws, WS, T.stream), "gmm_permute_fwd", "rows", "x");
        d.x = NULL; /* each call refuses operands of the other calls */
        d.out = &rows;
        OVERLAP(gmm_unpermute_fwd(T.ctx, &d, ws, WS, T.stream), "gmm_unpermute_fwd", "out", "rows");
        d.out = d.rows = NULL;
        d.drows = d.dx = &rows;
        OVERLAP(gmm_permute_bwd(T.ctx, &d, ws, WS, T.stream), "gmm_permute_bwd", "dx", "drows");
        d.dx = NULL;
        d.dout = &rows;
        d.rows = &tokens;
        OVERLAP(gmm_unpermute_bwd(T.ctx, &d, ws, WS, T.stream), "gmm_unpermute_bwd", "drows", "dout");
    }
}

static void quant_overlaps(int arg) {
    gmm_groups groups = groups3(counts3, NULL);
    gmm_format format = GMM_ZERO;
    char *memory = (char *)t_alloc(1 << 18);
    float *scale = floats(64), *amax = floats(64);
    gmm_mat src = view(GMM_F32, floats(ROWS * COLS), 0), row, col;
    gmm_quantization d = GMM_ZERO;
    void *ws = t_workspace(WS);
    (void)arg;
    format.dtype = GMM_E4M3;
    format.scaling = GMM_SCALING_TENSOR;
    row = gmm_mat_quantized(&format, GMM_ROWWISE, memory, scale, amax);
    col = gmm_mat_quantized(&format, GMM_COLUMNWISE, memory + (1 << 17), scale + 8, amax + 8);
    d.cols = COLS;
    d.groups = &groups;
    d.format = &format;
    d.src = &src;
    d.rowwise = &row;
    d.columnwise = &col;
    T_OK(gmm_quantize(T.ctx, &d, ws, WS, T.stream));
    col.data = row.data;
    OVERLAP(gmm_quantize(T.ctx, &d, ws, WS, T.stream), "gmm_quantize", "rowwise", "columnwise");
    col.data = memory + (1 << 17);
    row.scale = (char *)row.data + ROWS * COLS - 4;
    OVERLAP(gmm_quantize(T.ctx, &d, ws, WS, T.stream), "gmm_quantize", "rowwise", "rowwise.scale");
    row.scale = scale;
    row.amax = scale + 2;
    OVERLAP(gmm_quantize(T.ctx, &d, ws, WS, T.stream), "gmm_quantize", "rowwise.scale", "rowwise.amax");
    row.amax = amax;
    d.src_index = (const int32_t *)(const void *)memory;
    d.index_rows = ROWS;
    OVERLAP(gmm_quantize(T.ctx, &d, ws, WS, T.stream), "gmm_quantize", "rowwise", "src_index");
    d.src_index = NULL;
    d.index_rows = 0;
    row.data = src.data;
    OVERLAP(gmm_quantize(T.ctx, &d, ws, WS, T.stream), "gmm_quantize", "rowwise", "src");
    row.data = memory;
    {
        gmm_dequantization e = GMM_ZERO;
        gmm_mat dst = view(GMM_F32, past(scale, -(ROWS * COLS - 1) * 4), 0);
        e.cols = COLS;
        e.groups = &groups;
        e.src = &row;
        e.dst = &dst;
        OVERLAP(gmm_dequantize(T.ctx, &e, ws, WS, T.stream), "gmm_dequantize", "dst", "src.scale");
    }
    {
        gmm_transposition e = GMM_ZERO;
        gmm_mat to = gmm_mat_quantized(&format, GMM_COLUMNWISE, memory + 100, scale + 8, NULL);
        e.count = 1;
        e.rows = ROWS;
        e.cols = COLS;
        e.src = &row;
        e.dst = &to;
        OVERLAP(gmm_transpose(T.ctx, &e, ws, WS, T.stream), "gmm_transpose", "dst", "src");
    }
    {
        gmm_scale_update e = GMM_ZERO;
        e.slots = 4;
        e.history_length = 3;
        e.dtype = GMM_E4M3;
        e.history = amax;
        e.scale = amax + 11;
        OVERLAP(gmm_update_scales(T.ctx, &e, T.stream), "gmm_update_scales", "history", "scale");
    }
    {
        gmm_sharding e = GMM_ZERO;
        e.count = 1;
        e.rows = ROWS;
        e.cols = COLS;
        e.length = 64;
        e.format = &format;
        e.model = GMM_F32;
        e.phase = GMM_QUANT_AMAX;
        e.master = amax;
        e.amax = amax + 63;
        e.rowwise = &row;
        row.amax = NULL;
        OVERLAP(gmm_shard_cast(T.ctx, &e, T.stream), "gmm_shard_cast", "amax", "master");
    }
}

/* --------------------------------------------------------------------------------------------------- Splits --- */

/* Without a fault word a CPU context refuses the split before anything is written; a GPU context stays in bounds. */
#define FAULTY(call, function, ...) \
    do { \
        if (T.gpu) T_OK(call); \
        else T_REFUSED(GMM_E_SPLIT, call, function, __VA_ARGS__, NULL); \
    } while (0)

static void faulty_splits(int arg) {
    static const int32_t over[3] = { 4, 2, 1 }, negative[3] = { 2, -3, 3 };
    const int32_t *counts = arg ? over : negative;
    uint32_t *fault = (uint32_t *)t_alloc(sizeof *fault);
    gmm_groups groups = groups3(counts, NULL);
    gmm_mat x = view(GMM_F32, floats(ROWS * COLS), 0), y = view(GMM_F32, floats(12 * COLS), 0);
    const char *value = arg ? "1 of group 2" : "-3 of group 1", *rule = arg ? "capacity 6" : ">= 0";
    void *ws = t_workspace(WS);
    t_poison(fault, 0, sizeof *fault);
    for (int word = 0; word < 2; word++) {
        gmm_padding pad = GMM_ZERO;
        gmm_activation a = GMM_ZERO;
        gmm_act act = gmm_act_of(GMM_ACT_PRESET_NEMOTRON);
        groups.fault = word ? fault : NULL;
        pad.align = 2;
        pad.cols = COLS;
        pad.padded_capacity = 12;
        pad.groups = &groups;
        pad.src = &x;
        pad.dst = &y;
        a.ffn = COLS;
        a.groups = &groups;
        a.act = &act;
        a.x = &x;
        a.y = &y;
        if (word) {
            T_OK(gmm_act_fwd(T.ctx, &a, ws, WS, T.stream));
            T_OK(gmm_pad(T.ctx, &pad, ws, WS, T.stream));
        } else {
            FAULTY(gmm_act_fwd(T.ctx, &a, ws, WS, T.stream), "gmm_act_fwd: activation.groups.splits: ", value, rule);
            FAULTY(gmm_pad(T.ctx, &pad, ws, WS, T.stream), "gmm_pad: padding.groups.splits: ", value, rule);
        }
    }
    T_CHECK(*(uint32_t *)t_get(fault, 4) == (uint32_t)(arg ? GMM_FAULT_CAPACITY : GMM_FAULT_NEGATIVE), "fault word");
}

/* Splits that only the padded or permuted rows exceed. */
static void padded_splits(int arg) {
    gmm_groups groups = groups3(counts3, NULL);
    gmm_mat x = view(GMM_F32, floats(12 * COLS), 0), y = view(GMM_F32, floats(12 * COLS), 0);
    static const int32_t sizes[2] = { 3, 4 };
    gmm_padding pad = GMM_ZERO;
    gmm_permute p = GMM_ZERO;
    int32_t *map = (int32_t *)t_alloc(8 * sizeof *map);
    void *ws = t_workspace(WS);
    (void)arg;
    pad.align = 4;
    pad.cols = COLS;
    pad.padded_capacity = 8;
    pad.groups = &groups;
    pad.src = &x;
    pad.dst = &y;
    T_OK(gmm_pad(T.ctx, &pad, ws, WS, T.stream));
    T_OK(gmm_unpad(T.ctx, &pad, ws, WS, T.stream));
    pad.padded_capacity = 7;
    FAULTY(gmm_pad(T.ctx, &pad, ws, WS, T.stream), "gmm_pad: padding.padded_capacity: ", "7", "8 rows");
    FAULTY(gmm_unpad(T.ctx, &pad, ws, WS, T.stream), "gmm_unpad: padding.padded_capacity: ", "7", "8 rows");
    t_poison(map, 0xFF, 8 * sizeof *map);
    p.experts = 2;
    p.tokens = 3;
    p.capacity = 6;
    p.hidden = COLS;
    p.topk = 1;
    p.slot_of = map;
    p.sizes = (int32_t *)(uintptr_t)t_in(sizes, sizeof sizes);
    p.x = &x;
    p.rows = &y;
    FAULTY(gmm_permute_fwd(T.ctx, &p, ws, WS, T.stream), "gmm_permute_fwd: permute.sizes: ", "4 of group 1",
           "capacity 6");
    p.capacity = 7;
    T_OK(gmm_permute_fwd(T.ctx, &p, ws, WS, T.stream));
}

void tests_contracts(void) {
    t_add(linear_overlaps, 0, "contracts overlap grouped linear");
    t_add(table_overlaps, 0, "contracts overlap tables of destinations");
    t_add(many_experts, 0, "contracts overlap 2600 experts in order");
    t_add(many_experts, 1, "contracts overlap 2600 experts in any order");
    t_add(column_views, 0, "contracts overlap columns of one buffer are none");
    t_add(exact, 0, "contracts overlap to the byte, rows");
    t_add(exact, 1, "contracts overlap to the byte, packed matrices");
    t_add(exact, 2, "contracts overlap to the byte, tables");
    t_add(act_overlaps, 0, "contracts overlap activation");
    t_add(move_overlaps, 0, "contracts overlap pad, interleave, accumulate, convert, offsets");
    for (int i = 0; i < 3; i++)
        t_add(accumulate_in_place, i, "contracts overlap accumulate in place is allowed, %s",
              gmm_dtype_name(lin_dtype(i)));
    t_add(route_overlaps, 0, "contracts overlap routing and permutation");
    t_add(quant_overlaps, 0, "contracts overlap quantization");
    t_add(faulty_splits, 0, "contracts faulty split without a fault word, negative size");
    t_add(faulty_splits, 1, "contracts faulty split without a fault word, over the capacity");
    t_add(padded_splits, 0, "contracts faulty split without a fault word, padded and permuted rows");
}
