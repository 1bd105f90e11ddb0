/* test_pad.c - pad and unpad, the decision to pad, GLU interleave. */
#include "test.h"

#include <string.h>

static const gmm_dtype bytes_dtypes[] = { GMM_F32, GMM_F16, GMM_BF16, GMM_E4M3, GMM_E5M2, GMM_E8M0,
                                          GMM_U8, GMM_I32, GMM_I64, GMM_F64 };

/* A buffer of random bytes that the library must not write. */
static unsigned char *random_bytes(int64_t n, void **device) {
    unsigned char *host = (unsigned char *)t_host((size_t)n + 1);
    for (int64_t i = 0; i < n; i++) host[i] = (unsigned char)t_rand();
    *device = t_in(host, (size_t)n);
    return host;
}

/* ----------------------------------------------------------------------------------------------- Pad, unpad --- */

typedef struct pad_run {
    gmm_groups groups;
    gmm_padding d;
    gmm_mat src, dst;
    int64_t size, src_rows, dst_rows, src_ld, dst_ld; /* element size, in bytes */
    unsigned char *from;      /* host copy of src */
    float *from_prob;
    uint32_t *fault;
} pad_run;

static gmm_status pad_launch(gmm_op op, const gmm_padding *d) {
    gmm_info info = GMM_ZERO;
    const gmm_status s = gmm_pad_query(T.ctx, op, d, &info);
    void *workspace = s == GMM_OK ? t_workspace(info.workspace_bytes) : NULL;
    if (s != GMM_OK) return s;
    return (op == GMM_OP_PAD ? gmm_pad : gmm_unpad)(T.ctx, d, workspace, info.workspace_bytes, T.stream);
}

static pad_run pad_make(gmm_op op, gmm_dtype dtype, int64_t T_, int64_t R, int64_t cols, int32_t align, int64_t gap,
                        const int32_t *sizes, int32_t G) {
    pad_run r = GMM_ZERO;
    void *from, *from_prob;
    int64_t wide[300];
    for (int32_t g = 0; g < G && g < (int32_t)T_COUNT(wide); g++) wide[g] = sizes[g];
    t_splits(wide, G < (int32_t)T_COUNT(wide) ? G : T_COUNT(wide));
    t_about("%s %s, capacity %lld, padded %lld, %lld columns, align %d, gap %lld", gmm_op_name(op),
            gmm_dtype_name(dtype), (long long)T_, (long long)R, (long long)cols, (int)align, (long long)gap);
    r.size = ref_bytes(dtype);
    r.src_rows = op == GMM_OP_PAD ? T_ : R;
    r.dst_rows = op == GMM_OP_PAD ? R : T_;
    r.src_ld = cols + gap;
    r.dst_ld = cols + 2 * gap;
    r.from = random_bytes((r.src_rows ? (r.src_rows - 1) * r.src_ld + cols : 0) * r.size, &from);
    r.from_prob = (float *)(void *)random_bytes(r.src_rows * 4, &from_prob);
    r.fault = (uint32_t *)t_alloc(sizeof *r.fault);
    t_poison(r.fault, 0, sizeof *r.fault);
    r.groups.count = G;
    r.groups.capacity = T_;
    r.groups.splits = t_in(sizes, (size_t)G * sizeof *sizes);
    r.groups.dtype = GMM_I32;
    r.groups.fault = r.fault;
    r.src = gmm_mat_packed(dtype, from);
    r.dst = gmm_mat_packed(dtype, t_alloc((size_t)((r.dst_rows ? (r.dst_rows - 1) * r.dst_ld + cols : 0) * r.size)));
    r.src.ld = gap ? r.src_ld : 0;
    r.dst.ld = gap ? r.dst_ld : 0;
    r.d.align = align;
    r.d.cols = cols;
    r.d.padded_capacity = R;
    r.d.src_prob = (const float *)from_prob;
    r.d.dst_prob = (float *)t_alloc((size_t)r.dst_rows * 4);
    if (op == GMM_OP_PAD) r.d.sizes = (int32_t *)t_alloc((size_t)G * 4);
    return r;
}
static const gmm_padding *pad_bind(pad_run *r) {
    r->d.groups = &r->groups;
    r->d.src = &r->src;
    r->d.dst = &r->dst;
    return &r->d;
}

/* Compares with a loop over the groups, written apart from the library: live[g] rows are copied from row start[g] of
   the source, then zeros up to span[g] rows. Gaps keep their poison. */
static void pad_check(const pad_run *r, const int64_t *start, const int64_t *live, const int64_t *span) {
    const int64_t row = r->d.cols * r->size;
    const unsigned char *got = (const unsigned char *)t_get(
        r->dst.data, (size_t)((r->dst_rows ? (r->dst_rows - 1) * r->dst_ld : 0) * r->size + (r->dst_rows ? row : 0)));
    const unsigned char *prob =
        r->d.dst_prob ? (const unsigned char *)t_get(r->d.dst_prob, (size_t)r->dst_rows * 4) : NULL;
    const int tail = r->groups.tail == GMM_TAIL_ZERO ? 0 : 0xFF;
    int64_t at = 0;
    for (int32_t g = 0; g < r->groups.count; g++)
        for (int64_t i = 0; i < span[g]; i++, at++) {
            if (i < live[g]) {
                t_same("row", got + at * r->dst_ld * r->size, r->from + (start[g] + i) * r->src_ld * r->size,
                       (size_t)row);
                if (prob) t_same("prob", prob + 4 * at, r->from_prob + start[g] + i, 4);
            } else {
                t_bytes("padding row", got + at * r->dst_ld * r->size, 0, (size_t)row);
                if (prob) t_bytes("padding prob", prob + 4 * at, 0, 4);
            }
        }
    for (; at < r->dst_rows; at++) {
        t_bytes("tail", got + at * r->dst_ld * r->size, tail, (size_t)row);
        if (prob) t_bytes("tail of prob", prob + 4 * at, tail, 4);
    }
    for (int64_t i = 0; i + 1 < r->dst_rows; i++)
        t_bytes("gap", got + i * r->dst_ld * r->size + row, 0xFF, (size_t)(r->dst_ld * r->size - row));
}
#define pad_check(...) T_CALL(pad_check, __VA_ARGS__)

static void pad_sizes(int64_t groups, const int32_t *sizes, int32_t align, int64_t *start, int64_t *live,
                      int64_t *span) {
    int64_t sum = 0;
    for (int64_t g = 0; g < groups; g++) {
        start[g] = sum;
        live[g] = sizes[g];
        span[g] = 0;
        while (span[g] < live[g]) span[g] += align;
        sum += live[g];
    }
}

static const int32_t some_sizes[] = { 0, 1, 16, 5, 0, 0, 33, 31, 2, 0 };

/* Pad, compare, unpad, compare: every dtype of whole bytes. */
static void pad_round_trip(int arg) {
    static const int32_t aligns[] = { 1, 16, 32, 128, 256, 7 };
    const gmm_dtype dtype = bytes_dtypes[arg];
    for (int64_t k = 0; k < T_COUNT(aligns); k++) {
        const int64_t G = T_COUNT(some_sizes), R = 91 + G * (aligns[k] - 1) + 3;
        int64_t start[10], live[10], span[10], padded_start[10], sum = 0;
        pad_run r, back;
        const int32_t *sizes;
        pad_sizes(G, some_sizes, aligns[k], start, live, span);
        r = pad_make(GMM_OP_PAD, dtype, 91, R, 9, aligns[k], k % 2 ? 3 : 0, some_sizes, (int32_t)G);
        r.groups.tail = k & 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
        T_OK(pad_launch(GMM_OP_PAD, pad_bind(&r)));
        pad_check(&r, start, live, span);
        sizes = (const int32_t *)t_get(r.d.sizes, (size_t)G * 4);
        for (int64_t g = 0; g < G; g++) {
            T_CHECK(sizes[g] == span[g], "padded size %lld is %d instead of %lld", (long long)g, (int)sizes[g],
                    (long long)span[g]);
            padded_start[g] = sum;
            sum += span[g];
        }
        T_CHECK(*(uint32_t *)t_get(r.fault, 4) == 0, "fault word is %u", *(uint32_t *)t_get(r.fault, 4));
        back = pad_make(GMM_OP_UNPAD, dtype, 91, R, 9, aligns[k], k % 2 ? 2 : 0, some_sizes, (int32_t)G);
        back.groups.tail = r.groups.tail;
        if (k == 3) back.d.src_prob = NULL, back.d.dst_prob = NULL;
        T_OK(pad_launch(GMM_OP_UNPAD, pad_bind(&back)));
        pad_check(&back, padded_start, live, live);
    }
}

/* Pad, then unpad with the result: the original bytes. Splits in all forms. */
static void pad_inverse(int arg) {
    const int64_t offsets64[4] = { 0, 3, 3, 8 };
    const int32_t offsets32[4] = { 0, 3, 3, 8 }, sizes32[3] = { 3, 0, 5 };
    const int64_t sizes64[3] = { 3, 0, 5 };
    pad_run r = pad_make(GMM_OP_PAD, GMM_BF16, 11, 24, 100, 8, 0, sizes32, 3), back;
    const void *forms[4] = { t_in(sizes32, sizeof sizes32), t_in(sizes64, sizeof sizes64),
                             t_in(offsets32, sizeof offsets32), t_in(offsets64, sizeof offsets64) };
    r.groups.splits = forms[arg];
    r.groups.dtype = arg % 2 ? GMM_I64 : GMM_I32;
    r.groups.form = arg < 2 ? GMM_SPLIT_SIZES : GMM_SPLIT_OFFSETS;
    T_OK(pad_launch(GMM_OP_PAD, pad_bind(&r)));
    back = r;
    back.src = r.dst;
    back.dst = gmm_mat_packed(GMM_BF16, t_alloc(11 * 100 * 2));
    back.d.src_prob = r.d.dst_prob;
    back.d.dst_prob = (float *)t_alloc(11 * 4);
    back.d.sizes = NULL;
    back.groups.tail = GMM_TAIL_ZERO;
    T_OK(pad_launch(GMM_OP_UNPAD, pad_bind(&back)));
    {
        const unsigned char *got = (const unsigned char *)t_get(back.dst.data, 11 * 200);
        t_same("rows", got, r.from, 8 * 200);
        t_bytes("tail", got + 8 * 200, 0, 3 * 200);
        t_same("prob", t_get(back.d.dst_prob, 8 * 4), r.from_prob, 8 * 4);
    }
}

static void pad_edges(int arg) {
    const int32_t none[3] = { 0, 0, 0 }, full[3] = { 4, 4, 8 };
    int64_t start[3], live[3], span[3];
    pad_run r = pad_make(GMM_OP_PAD, GMM_F32, 16, 16, 5, 4, 0, none, 3);
    (void)arg;
    r.groups.tail = GMM_TAIL_ZERO; /* all empty: no padding, every row is tail */
    T_OK(pad_launch(GMM_OP_PAD, pad_bind(&r)));
    pad_sizes(3, none, 4, start, live, span);
    pad_check(&r, start, live, span);
    t_bytes("sizes", t_get(r.d.sizes, 12), 0, 12);
    /* already aligned, no spare capacity, no sizes output */
    r = pad_make(GMM_OP_PAD, GMM_F32, 16, 16, 5, 4, 0, full, 3);
    r.d.sizes = NULL;
    T_OK(pad_launch(GMM_OP_PAD, pad_bind(&r)));
    pad_sizes(3, full, 4, start, live, span);
    pad_check(&r, start, live, span);
    r = pad_make(GMM_OP_PAD, GMM_F32, 0, 0, 5, 4, 0, none, 3); /* no rows at all */
    r.src.data = r.dst.data = NULL;
    r.d.src_prob = NULL;
    r.d.dst_prob = NULL;
    T_OK(pad_launch(GMM_OP_PAD, pad_bind(&r)));
    r.d.sizes = NULL;
    T_OK(pad_launch(GMM_OP_UNPAD, pad_bind(&r)));
}

/* A destination that is too small: the excess is cut off and reported as a fault; nothing is written out of bounds. */
static void pad_overflow(int arg) {
    const int32_t sizes[4] = { 5, 6, 7, 2 }, cut[4] = { 8, 6, 0, 0 };
    const int64_t start[4] = { 0, 5, 11, 18 }, live[4] = { 5, 6, 0, 0 }, span[4] = { 8, 6, 0, 0 };
    pad_run r = pad_make(GMM_OP_PAD, GMM_BF16, 20, 14, 6, 8, 0, sizes, 4);
    (void)arg;
    T_OK(pad_launch(GMM_OP_PAD, pad_bind(&r)));
    pad_check(&r, start, live, span);
    t_same("sizes", t_get(r.d.sizes, sizeof cut), cut, sizeof cut);
    T_CHECK(*(uint32_t *)t_get(r.fault, 4) == (uint32_t)GMM_FAULT_CAPACITY, "fault word");
    { /* unpad writes zeros for rows that the padded buffer lacks */
        const int64_t padded_start[4] = { 0, 8, 14, 14 }, there[4] = { 5, 6, 0, 0 }, all[4] = { 5, 6, 7, 2 };
        r = pad_make(GMM_OP_UNPAD, GMM_BF16, 20, 14, 6, 8, 0, sizes, 4);
        T_OK(pad_launch(GMM_OP_UNPAD, pad_bind(&r)));
        pad_check(&r, padded_start, there, all);
        T_CHECK(*(uint32_t *)t_get(r.fault, 4) == (uint32_t)GMM_FAULT_CAPACITY, "fault word");
    }
    { /* faulty sizes are clamped */
        const int32_t bad[4] = { 5, -6, 700, 2 };
        const int64_t s[4] = { 0, 5, 5, 20 }, l[4] = { 5, 0, 15, 0 }, p[4] = { 8, 0, 16, 0 };
        r = pad_make(GMM_OP_PAD, GMM_BF16, 20, 48, 6, 8, 0, bad, 4);
        r.groups.tail = GMM_TAIL_ZERO;
        T_OK(pad_launch(GMM_OP_PAD, pad_bind(&r)));
        pad_check(&r, s, l, p);
        T_CHECK(*(uint32_t *)t_get(r.fault, 4) == ((uint32_t)GMM_FAULT_NEGATIVE | (uint32_t)GMM_FAULT_CAPACITY),
                "fault word");
    }
}

static void pad_many_groups(int arg) {
    int32_t sizes[300];
    int64_t start[300], live[300], span[300], T_ = 0;
    pad_run r;
    (void)arg;
    for (int g = 0; g < 300; g++) T_ += sizes[g] = (int32_t)t_int(0, 9) * (int32_t)t_int(0, 1);
    r = pad_make(GMM_OP_PAD, GMM_F16, T_, T_ + 300 * 15, 40, 16, 1, sizes, 300);
    T_OK(pad_launch(GMM_OP_PAD, pad_bind(&r)));
    pad_sizes(300, sizes, 16, start, live, span);
    pad_check(&r, start, live, span);
}

#define REFUSE(status, change, restore, ...) \
    do { \
        change; \
        T_REFUSED(status, gmm_pad(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream), "gmm_pad: padding", \
                  __VA_ARGS__, NULL); \
        restore; \
    } while (0)

static void pad_bad(int arg) {
    const int32_t sizes[2] = { 5, 6 };
    const char *shapes = "G=2 T=12 R=32 cols=6 align=8 bf16";
    pad_run r = pad_make(GMM_OP_PAD, GMM_BF16, 12, 32, 6, 8, 0, sizes, 2);
    gmm_info info = GMM_ZERO;
    gmm_padding d;
    gmm_mat src = r.src, dst = r.dst;
    char *workspace;
    (void)arg;
    d = *pad_bind(&r);
    T_OK(gmm_pad_query(T.ctx, GMM_OP_PAD, &r.d, &info));
    workspace = (char *)t_workspace(info.workspace_bytes + 256);
    REFUSE(GMM_E_ARG, r.d.align = 0, r.d = d, "align: 0 must be >= 1");
    REFUSE(GMM_E_ARG, r.d.align = -4, r.d = d, "align: -4");
    REFUSE(GMM_E_ARG, r.d.cols = 0, r.d = d, "cols: 0 must be >= 1");
    REFUSE(GMM_E_ARG, r.d.padded_capacity = -1, r.d = d, "padded_capacity: -1 must be >= 0");
    REFUSE(GMM_E_ARG, r.d.padded_capacity = (int64_t)1 << 31, r.d = d, "padded_capacity: 2147483648", "int32");
    REFUSE(GMM_E_OVERFLOW, r.d.cols = INT64_MAX / 8, r.d = d, "src: ", "do not fit 64 bits");
    REFUSE(GMM_E_NULL, r.d.groups = NULL, r.d = d, ".groups is NULL", "R=32 cols=6 align=8 bf16");
    REFUSE(GMM_E_NULL, r.d.src = NULL, r.d = d, ".src is NULL");
    REFUSE(GMM_E_NULL, r.d.dst = NULL, r.d = d, ".dst is NULL", shapes);
    REFUSE(GMM_E_NULL, r.d.src_prob = NULL, r.d = d, ".src_prob is NULL", shapes);
    REFUSE(GMM_E_NULL, r.d.dst_prob = NULL, r.d = d, ".dst_prob is NULL", shapes);
    REFUSE(GMM_E_ALIGN, r.d.sizes = (int32_t *)(void *)((char *)d.sizes + 1), r.d = d, "sizes: ", "aligned");
    REFUSE(GMM_E_DTYPE, r.dst.dtype = GMM_F16, r.dst = dst, "dst: dtype f16 must be that of padding.src, bf16", shapes);
    REFUSE(GMM_E_DTYPE, r.src.dtype = GMM_E2M1, r.src = src, "src: dtype e2m1");
    REFUSE(GMM_E_STRIDE, r.src.ld = 5, r.src = src, "src: ld 5 must be >= the 6 columns");
    REFUSE(GMM_E_STRIDE, r.dst.ld = 5, r.dst = dst, "dst: ld 5");
    REFUSE(GMM_E_ALIGN, r.dst.data = (char *)r.dst.data + 1, r.dst = dst, "dst: ", "aligned");
    REFUSE(GMM_E_NULL, r.dst.data = NULL, r.dst = dst, "dst has neither data nor table");
    REFUSE(GMM_E_VERSION, r.d.struct_size = sizeof r.d + 1, r.d = d, "padding: struct_size");
    T_REFUSED(GMM_E_NULL, gmm_pad(T.ctx, NULL, NULL, 0, T.stream), "gmm_pad: padding is NULL", NULL);
    T_REFUSED(GMM_E_WORKSPACE, gmm_pad(T.ctx, &r.d, workspace, info.workspace_bytes - 1, T.stream), "gmm_pad: ",
              "workspace_bytes", shapes, NULL);
    T_REFUSED(GMM_E_NULL, gmm_pad(T.ctx, &r.d, NULL, info.workspace_bytes, T.stream), "gmm_pad: workspace", NULL);
    T_REFUSED(GMM_E_ALIGN, gmm_pad(T.ctx, &r.d, workspace + 8, info.workspace_bytes, T.stream), "workspace", NULL);
    T_REFUSED(GMM_E_ARG, gmm_pad_query(T.ctx, GMM_OP_ACT_FWD, &r.d, &info), "gmm_pad_query: op", shapes, NULL);
    r.groups.splits = sizes;
    r.groups.on_host = 1;
    r.groups.capacity = 10;
    T_REFUSED(GMM_E_SPLIT, gmm_unpad(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream), "gmm_unpad: ",
              "size 6 of group 1", "T=10", NULL);
}
#undef REFUSE

/* ------------------------------------------------------------------------------------------ The decision to pad --- */

static void align_table(int arg) {
    static const int32_t want[6] = { 1, 16, 16, 16, 32, 128 };
    (void)arg;
    for (int recipe = 0; recipe < 6; recipe++) {
        T_CHECK(gmm_pad_align((gmm_recipe_kind)recipe, 0) == want[recipe], "recipe %d", recipe);
        T_CHECK(gmm_pad_align((gmm_recipe_kind)recipe, 1) == 256, "recipe %d, grouped tensor", recipe);
    }
    T_CHECK(gmm_pad_align((gmm_recipe_kind)6, 0) == 1, "unknown recipe");
}

/* All 6 x 5 x 16 inputs against the rule as documented. */
static void decide_table(int arg) {
    gmm_error error;
    int32_t align = 0;
    gmm_pad_in in = GMM_ZERO;
    (void)arg;
    for (int i = 0; i < 6 * 5 * 16; i++) {
        const int router = i & 1, done = i >> 1 & 1, grouped = i >> 2 & 1, fusion = i >> 3 & 1;
        int already = 0;
        in.recipe = (gmm_recipe_kind)(i / 16 / 5);
        in.dispatcher = (gmm_dispatcher)(i / 16 - 5 * (i / 80));
        in.router_padding = router;
        in.router_padding_done = done;
        in.grouped_tensor = grouped;
        in.permute_fusion = fusion;
        if (router && done) already = 1;
        if (in.dispatcher == GMM_DISPATCH_HYBRIDEP || in.dispatcher == GMM_DISPATCH_NCCLEP) already = 1;
        if (in.dispatcher == GMM_DISPATCH_DEEPEP && grouped && fusion) already = 1;
        align = -5;
        T_OK_TEXT(gmm_pad_decide(&in, &align, &error), error.text);
        T_CHECK(align == (already ? 1 : gmm_pad_align(in.recipe, grouped)), "input %d: align %d", i, (int)align);
    }
    /* DeepEP with too few tokens: the router could not pad as requested, so the experts must */
    memset(&in, 0, sizeof in);
    in.recipe = GMM_RECIPE_MXFP8;
    in.dispatcher = GMM_DISPATCH_DEEPEP;
    in.router_padding = 1;
    T_OK_TEXT(gmm_pad_decide(&in, &align, &error), error.text);
    T_CHECK(align == 32, "DeepEP fallback: align %d", (int)align);
    /* any dispatcher: an unaligned count from the router is padded; an aligned one is not */
    in.dispatcher = GMM_DISPATCH_ALLTOALL;
    in.recipe = GMM_RECIPE_FP8_BLOCK;
    T_OK_TEXT(gmm_pad_decide(&in, &align, &error), error.text);
    T_CHECK(align == 16, "unreached multiple: align %d", (int)align);
    in.router_padding_done = 1;
    T_OK_TEXT(gmm_pad_decide(&in, &align, &error), error.text);
    T_CHECK(align == 1, "reached multiple: align %d", (int)align);
    /* bad input */
    align = 77;
    in.recipe = (gmm_recipe_kind)6;
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_pad_decide(&in, &align, &error), error.text, "gmm_pad_decide: in.recipe: 6",
                   NULL);
    in.recipe = (gmm_recipe_kind)-1;
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_pad_decide(&in, &align, &error), error.text, "recipe: -1", NULL);
    in.recipe = GMM_RECIPE_NVFP4;
    in.dispatcher = (gmm_dispatcher)5;
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_pad_decide(&in, &align, &error), error.text, "in.dispatcher: 5", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_pad_decide(NULL, &align, &error), error.text, "in is NULL", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_pad_decide(&in, NULL, &error), error.text, "align is NULL", NULL);
    T_CHECK(gmm_pad_decide(NULL, &align, NULL) == GMM_E_NULL && align == 77, "align was written: %d", (int)align);
}

/* ----------------------------------------------------------------------------------------------- GLU interleave --- */

static gmm_status glu_launch(const gmm_glu *d) {
    gmm_info info = GMM_ZERO;
    const gmm_status s = gmm_glu_query(T.ctx, GMM_OP_GLU_INTERLEAVE, d, &info);
    void *workspace = s == GMM_OK ? t_workspace(info.workspace_bytes) : NULL;
    if (s != GMM_OK) return s;
    return gmm_glu_interleave(T.ctx, d, workspace, info.workspace_bytes, T.stream);
}

/* Index in the halves layout of row or column r of the interleaved layout. */
static int64_t halves_of(int64_t r, int64_t ffn, int64_t B) {
    const int64_t j = r / (2 * B), h = r / B - 2 * j, t = r - (2 * j + h) * B;
    return h * ffn + j * B + t;
}

typedef struct glu_buffer {
    gmm_mat mat;
    void *data;
    void **table;
    unsigned char *host; /* host copy of inputs, [count][stride] elements */
    int64_t ld, stride;
} glu_buffer;

static glu_buffer glu_make(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols, int64_t gap, t_form form,
                           int input) {
    const int64_t size = ref_bytes(dtype), span = (rows - 1) * (cols + gap) + cols;
    glu_buffer b = GMM_ZERO;
    b.ld = cols + gap;
    b.stride = rows * b.ld + gap;
    if (form == T_PACKED) {
        const int64_t all = (count - 1) * b.stride + span;
        if (input) b.host = random_bytes(all * size, &b.data);
        else b.data = t_alloc((size_t)(all * size));
        b.mat = gmm_mat_packed(dtype, b.data);
        if (gap && count > 1) b.mat.group_stride = b.stride;
    } else {
        b.table = (void **)t_host((size_t)count * sizeof *b.table);
        b.host = (unsigned char *)t_host((size_t)(count * b.stride * size));
        for (int64_t g = 0; g < count; g++) {
            if (input)
                memcpy(b.host + g * b.stride * size, random_bytes(span * size, &b.table[g]), (size_t)(span * size));
            else b.table[g] = t_alloc((size_t)(span * size));
        }
        b.mat = form == T_TABLE ? gmm_mat_table(dtype, (void *const *)t_in(b.table, (size_t)count * sizeof *b.table), 0)
                                : gmm_mat_table(dtype, b.table, GMM_MAT_TABLE_ON_HOST);
    }
    if (gap) b.mat.ld = b.ld;
    return b;
}

static const unsigned char *glu_get(const glu_buffer *b, int64_t g, int64_t rows, int64_t cols, int64_t size) {
    const int64_t span = (rows - 1) * b->ld + cols;
    return (const unsigned char *)t_get(b->table ? b->table[g] : (char *)b->data + g * b->stride * size,
                                        (size_t)(span * size));
}

static void glu_case(gmm_glu_axis axis, gmm_dtype dtype, int64_t ffn, int64_t B, int64_t count, int64_t cols,
                     int64_t gap, t_form from_form, t_form to_form, int inverse) {
    const int columns = axis == GMM_GLU_COLUMNS;
    const int64_t size = ref_bytes(dtype), matrices = columns ? 1 : count;
    const int64_t rows = columns ? count : 2 * ffn, width = columns ? 2 * ffn : cols;
    const glu_buffer src = glu_make(dtype, matrices, rows, width, gap, from_form, 1);
    const glu_buffer dst = glu_make(dtype, matrices, rows, width, 2 * gap, to_form, 0);
    gmm_glu d = GMM_ZERO;
    d.axis = axis;
    d.inverse = inverse;
    d.block = (int32_t)B;
    d.ffn = ffn;
    d.count = count;
    d.cols = columns ? 0 : cols;
    d.src = &src.mat;
    d.dst = &dst.mat;
    T_OK(glu_launch(&d));
    for (int64_t g = 0; g < matrices; g++) {
        const unsigned char *got = glu_get(&dst, g, rows, width, size), *from = src.host + g * src.stride * size;
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c < width; c++) {
                /* index of the same element in the interleaved layout and in halves */
                const int64_t blocked = r * (inverse ? src.ld : dst.ld) + c;
                const int64_t half = columns ? r * (inverse ? dst.ld : src.ld) + halves_of(c, ffn, B)
                                             : halves_of(r, ffn, B) * (inverse ? dst.ld : src.ld) + c;
                t_same("element", got + (inverse ? half : blocked) * size, from + (inverse ? blocked : half) * size,
                       (size_t)size);
            }
            if (r + 1 < rows)
                t_bytes("gap", got + (r * dst.ld + width) * size, 0xFF, (size_t)((dst.ld - width) * size));
        }
    }
}

static void glu_blocks(int arg) {
    static const int64_t blocks[] = { 1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 96 };
    const gmm_dtype dtype = bytes_dtypes[arg];
    for (int64_t i = 0; i < T_COUNT(blocks); i++)
        for (int inverse = 0; inverse < 2; inverse++) {
            const int64_t gap = i & 1 ? 5 : 0;
            glu_case(GMM_GLU_ROWS, dtype, 96, blocks[i], 3, 7, gap, T_PACKED, T_PACKED, inverse);
            glu_case(GMM_GLU_COLUMNS, dtype, 96, blocks[i], 5, 0, gap, T_PACKED, T_PACKED, inverse);
        }
}
static void glu_forms(int arg) {
    const t_form from = (t_form)(arg % 3), to = (t_form)(arg / 3);
    glu_case(GMM_GLU_ROWS, GMM_BF16, 12, 4, 5, 9, 0, from, to, 0);
    glu_case(GMM_GLU_ROWS, GMM_F32, 12, 4, 5, 9, 2, from, to, 1);
    glu_case(GMM_GLU_ROWS, GMM_BF16, 64, 32, 4, 1, 0, from, to, 0); /* biases */
    glu_case(GMM_GLU_ROWS, GMM_F32, 6, 6, 1, 1, 0, from, to, 0);
}

/* Interleaving and its inverse are the identity; B = ffn is, too; the published example 1..8 with B = 2; agreement with
   the columns that the activation reads. */
static void glu_identities(int arg) {
    static const uint8_t counting[8] = { 1, 2, 3, 4, 5, 6, 7, 8 }, blocked[8] = { 1, 2, 5, 6, 3, 4, 7, 8 };
    gmm_mat src = gmm_mat_packed(GMM_U8, t_in(counting, 8)), dst = gmm_mat_packed(GMM_U8, t_alloc(8));
    gmm_mat back = gmm_mat_packed(GMM_U8, t_alloc(8));
    gmm_glu d = GMM_ZERO;
    (void)arg;
    d.block = 2;
    d.ffn = 4;
    d.count = 1;
    d.cols = 1;
    d.src = &src;
    d.dst = &dst;
    for (int axis = 0; axis < 2; axis++) {
        d.axis = (gmm_glu_axis)axis;
        d.inverse = 0;
        d.src = &src;
        d.dst = &dst;
        T_OK(glu_launch(&d));
        t_same("example", t_get(dst.data, 8), blocked, 8);
        d.inverse = 1;
        d.src = &dst;
        d.dst = &back;
        T_OK(glu_launch(&d));
        t_same("back", t_get(back.data, 8), counting, 8);
    }
    d.block = 4;
    d.inverse = 0;
    d.src = &src;
    d.dst = &dst;
    T_OK(glu_launch(&d));
    t_same("identity", t_get(dst.data, 8), counting, 8);
    for (int64_t B = 1; B <= 12; B++)
        for (int64_t j = 0; j < 12 && 12 / B * B == 12; j++) {
            T_CHECK(halves_of(gmm_glu_gate_column(j, B), 12, B) == j, "gate %lld", (long long)j);
            T_CHECK(halves_of(gmm_glu_linear_column(j, 12, B), 12, B) == 12 + j, "linear %lld", (long long)j);
        }
    T_CHECK(gmm_glu_gate_column(5, 0) == 5 && gmm_glu_linear_column(5, 12, 0) == 17, "halves");
}

static void glu_nothing(int arg) {
    gmm_mat src = gmm_mat_packed(GMM_BF16, NULL), dst = gmm_mat_packed(GMM_BF16, NULL);
    gmm_glu d = GMM_ZERO;
    (void)arg;
    d.block = 2;
    d.ffn = 4;
    d.cols = 3;
    d.src = &src;
    d.dst = &dst;
    T_OK(glu_launch(&d));
    src.group_stride = 24;
    src.ld = 3;
    T_OK(glu_launch(&d));
    d.axis = GMM_GLU_COLUMNS;
    src.group_stride = 0;
    T_OK(glu_launch(&d));
    if (T.engine == GMM_ENGINE_CPU) { /* no extent counts where there is no matrix */
        d.axis = GMM_GLU_ROWS;
        d.block = 4;
        d.cols = (int64_t)1 << 62;
        src.ld = 0;
        T_OK(glu_launch(&d));
    }
    dst.dtype = GMM_F32;
    T_REFUSED(GMM_E_DTYPE, gmm_glu_interleave(T.ctx, &d, NULL, 0, T.stream), "dst: dtype f32", NULL);
}

/* Unpad does not write `sizes`, so that these set no limit to its rows. */
static void unpad_many_rows(int arg) {
    static const int32_t sizes[1] = { 0 };
    pad_run r = pad_make(GMM_OP_UNPAD, GMM_BF16, 0, 0, 8, 1, 0, sizes, 1);
    gmm_info info = GMM_ZERO;
    (void)arg;
    if (T.engine != GMM_ENGINE_CPU) t_skip("GPUs take fewer rows");
    r.d.padded_capacity = 3000000000;
    r.d.sizes = (int32_t *)t_alloc(4);
    T_OK(gmm_pad_query(T.ctx, GMM_OP_UNPAD, pad_bind(&r), &info));
}

#define REFUSE(status, change, ...) \
    do { \
        change; \
        T_REFUSED(status, gmm_glu_interleave(T.ctx, &d, NULL, 0, T.stream), "gmm_glu_interleave: glu", __VA_ARGS__, \
                  NULL); \
        d = good; \
        src = good_src; \
        dst = good_dst; \
    } while (0)

static void glu_bad(int arg) {
    void *table[2] = { t_alloc(96), NULL };
    gmm_mat src = gmm_mat_packed(GMM_BF16, t_alloc(96)), dst = gmm_mat_packed(GMM_BF16, t_alloc(96));
    const gmm_mat good_src = src, good_dst = dst;
    gmm_glu d = GMM_ZERO, good;
    gmm_info info = GMM_ZERO;
    (void)arg;
    d.block = 2;
    d.ffn = 4;
    d.count = 2;
    d.cols = 3;
    d.src = &src;
    d.dst = &dst;
    good = d;
    REFUSE(GMM_E_CONFIG, d.block = 3, "block: 3 must be >= 1 and divide ffn 4", "rows count=2 ffn=4 cols=3 block=3 bf");
    REFUSE(GMM_E_CONFIG, d.block = 0, "block: 0");
    REFUSE(GMM_E_CONFIG, d.block = -2, "block: -2");
    REFUSE(GMM_E_CONFIG, d.block = 8, "block: 8");
    REFUSE(GMM_E_ARG, d.axis = (gmm_glu_axis)2, "axis: 2 is neither rows (0) nor columns (1)");
    REFUSE(GMM_E_ARG, d.inverse = 2, "inverse: 2 must be 0 or 1");
    REFUSE(GMM_E_ARG, d.ffn = 0, "ffn: 0 must be >= 1");
    REFUSE(GMM_E_OVERFLOW, d.ffn = INT64_MAX - 1, "ffn: 9223372036854775806");
    REFUSE(GMM_E_OVERFLOW, d.ffn = INT64_MAX / 4 - 1, "src: ", "do not fit 64 bits");
    REFUSE(GMM_E_ARG, d.count = -1, "count: -1 must be >= 0");
    REFUSE(GMM_E_ARG, d.cols = 0, "cols: 0 must be >= 1");
    REFUSE(GMM_E_NULL, d.src = NULL, ".src is NULL");
    REFUSE(GMM_E_NULL, d.dst = NULL, ".dst is NULL");
    REFUSE(GMM_E_NULL, src.data = NULL, "src has neither data nor table");
    REFUSE(GMM_E_ARG, src.table = table, "src has both data and table");
    REFUSE(GMM_E_NULL, (dst = gmm_mat_table(GMM_BF16, table, GMM_MAT_TABLE_ON_HOST)), "dst: table[1] is NULL");
    REFUSE(GMM_E_ARG, (d.axis = GMM_GLU_COLUMNS, src.data = NULL, src.table = table), "src is one matrix",
           "not table", "columns");
    REFUSE(GMM_E_DTYPE, dst.dtype = GMM_F16, "dst: dtype f16 must be that of glu.src, bf16");
    REFUSE(GMM_E_DTYPE, src.dtype = GMM_E2M1, "src: dtype e2m1");
    REFUSE(GMM_E_STRIDE, src.ld = 2, "src: ld 2 must be >= the 3 columns");
    REFUSE(GMM_E_STRIDE, dst.group_stride = 23, "dst: group_stride 23 must be >= 24");
    REFUSE(GMM_E_ALIGN, dst.data = (char *)dst.data + 1, "dst: ", "aligned");
    REFUSE(GMM_E_VERSION, d.struct_size = sizeof d + 8, "glu: struct_size");
    T_REFUSED(GMM_E_NULL, gmm_glu_interleave(T.ctx, NULL, NULL, 0, T.stream), "gmm_glu_interleave: glu is NULL", NULL);
    T_REFUSED(GMM_E_ARG, gmm_glu_query(T.ctx, GMM_OP_PAD, &d, &info), "gmm_glu_query: op", NULL);
    T_OK(glu_launch(&d));
}

/* --------------------------------------------------------------------------------------------------- Cases --- */

/* Pad and unpad of any sizes, or an interleave of any blocks. */
static void drawn(int arg) {
    enum { MOST = 24 };
    const gmm_dtype dtype = bytes_dtypes[t_int(0, T_COUNT(bytes_dtypes) - 1)];
    const int64_t G = t_int(1, MOST), cols = t_draw_size(60, 700), T_ = t_draw_size(90, 300);
    const int32_t align = (int32_t)t_int(1, t_int(0, 1) ? 40 : 256);
    const int64_t R = T_ + G * (align - 1) + t_int(0, 9), *wide = t_draw_sizes(G, T_);
    int64_t start[MOST], live[MOST], span[MOST], at[MOST], sum = 0;
    int32_t sizes[MOST];
    pad_run r;
    (void)arg;
    if (t_int(0, 2) == 0) {
        const int64_t block = t_int(1, 24), ffn = block * t_int(1, 6);
        const gmm_glu_axis axis = t_int(0, 1) ? GMM_GLU_ROWS : GMM_GLU_COLUMNS;
        const int rows = axis == GMM_GLU_ROWS;
        glu_case(axis, dtype, ffn, block, t_int(1, 5), rows ? t_int(1, 30) : 0, t_int(0, 1) * t_int(0, 6),
                 rows ? (t_form)t_int(0, 2) : T_PACKED, rows ? (t_form)t_int(0, 2) : T_PACKED, (int)t_int(0, 1));
        return;
    }
    for (int64_t g = 0; g < G; g++) sizes[g] = (int32_t)wide[g];
    pad_sizes(G, sizes, align, start, live, span);
    r = pad_make(GMM_OP_PAD, dtype, T_, R, cols, align, t_int(0, 1) * t_int(0, 6), sizes, (int32_t)G);
    r.groups.tail = (gmm_tail)t_int(0, 1);
    T_OK(pad_launch(GMM_OP_PAD, pad_bind(&r)));
    pad_check(&r, start, live, span);
    T_CHECK(*(uint32_t *)t_get(r.fault, 4) == 0, "fault word is %u", *(uint32_t *)t_get(r.fault, 4));
    for (int64_t g = 0; g < G; g++) {
        at[g] = sum;
        sum += span[g];
    }
    r = pad_make(GMM_OP_UNPAD, dtype, T_, R, cols, align, t_int(0, 1) * t_int(0, 6), sizes, (int32_t)G);
    r.groups.tail = (gmm_tail)t_int(0, 1);
    T_OK(pad_launch(GMM_OP_UNPAD, pad_bind(&r)));
    pad_check(&r, at, live, live);
}

void tests_pad(void) {
    t_add(drawn, 0, "pad and interleave drawn at random");
    t_random(5);
    t_add_host(align_table, 0, "pad align sizes");
    t_add_host(decide_table, 0, "pad decision, all inputs");
    for (int i = 0; i < (int)T_COUNT(bytes_dtypes); i++) {
        t_add(pad_round_trip, i, "pad and unpad %s", gmm_dtype_name(bytes_dtypes[i]));
        t_add(glu_blocks, i, "glu interleave %s", gmm_dtype_name(bytes_dtypes[i]));
    }
    for (int i = 0; i < 4; i++) t_add(pad_inverse, i, "pad then unpad, split form %d", i);
    for (int i = 0; i < 9; i++) t_add(glu_forms, i, "glu interleave packed and tables %d", i);
    t_add(pad_edges, 0, "pad empty groups, aligned groups, no rows");
    t_add(pad_overflow, 0, "pad beyond the capacity");
    t_add(pad_many_groups, 0, "pad 300 groups");
    t_add(pad_bad, 0, "pad bad input");
    t_add(glu_identities, 0, "glu interleave identities");
    t_add(unpad_many_rows, 0, "unpad of more rows than sizes can count");
    t_add(glu_nothing, 0, "glu interleave of nothing");
    t_add(glu_bad, 0, "glu interleave bad input");
}
