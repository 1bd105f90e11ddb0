/* test_verify.c - gmm_config.verify: what would set a fault bit is refused, and nothing is written; all else is
   computed as without it */
#include "device.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

/* A context like T.ctx that verifies. */
static gmm_context *verifying(void) {
    gmm_config c = T.config;
    c.verify = 1;
    return t_context(&c);
}

/* A linear layer with so many groups that the split is read in parts; the last rows of y are not live. */
enum { GROUPS = 300, ROWS = 700, K = 8, N = 4, ROW_ALIGN = 2 };
typedef struct layer {
    gmm_groups groups;
    gmm_linear d;
    gmm_mat x, w, y;
    uint32_t *fault;
    size_t bytes;
    void *workspace;
    char before[ROWS * N * 4];
} layer;

static void build(layer *l, gmm_split_form form, gmm_dtype dtype) {
    static const uint32_t zero;
    static float ones[GROUPS * N * K + ROWS * K];
    gmm_info info = GMM_ZERO;
    memset(l, 0, sizeof *l);
    for (size_t i = 0; i < sizeof ones / sizeof ones[0]; i++) ones[i] = (float)(i % 5);
    l->x = gmm_mat_packed(GMM_F32, t_in(ones, ROWS * K * 4));
    l->w = gmm_mat_packed(GMM_F32, t_in(ones + ROWS * K, GROUPS * N * K * 4));
    l->y = gmm_mat_packed(GMM_F32, t_alloc(sizeof l->before));
    l->fault = (uint32_t *)t_alloc(sizeof zero);
    t_upload(l->fault, &zero, sizeof zero);
    l->groups.count = GROUPS;
    l->groups.capacity = ROWS;
    l->groups.dtype = dtype;
    l->groups.form = form;
    l->groups.row_align = ROW_ALIGN;
    l->groups.fault = l->fault;
    l->d.groups = &l->groups;
    l->d.in_features = K;
    l->d.out_features = N;
    l->d.x = &l->x;
    l->d.w = &l->w;
    l->d.y = &l->y;
    T_OK(gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, &l->d, &info));
    l->bytes = info.workspace_bytes;
    l->workspace = t_workspace(l->bytes);
    t_download(l->before, l->y.data, sizeof l->before);
}

/* Rows in groups at both sides of the boundary between the parts, and in the first and the last group. */
static void usual(int64_t sizes[GROUPS]) {
    for (int g = 0; g < GROUPS; g++) sizes[g] = g == 0 || (g > 253 && g < 258) || g == GROUPS - 1 ? 2 : 0;
}

/* Puts the split of these sizes into the context's memory; as offsets, a size below 0 makes them fall. */
static void put(layer *l, const int64_t sizes[GROUPS]) {
    int64_t wide[GROUPS + 1], at = 0;
    int32_t narrow[GROUPS + 1];
    const int offsets = l->groups.form == GMM_SPLIT_OFFSETS;
    const size_t count = GROUPS + (size_t)offsets;
    for (size_t i = 0; i < count; i++) {
        wide[i] = offsets ? at : sizes[i];
        narrow[i] = (int32_t)wide[i];
        if (i < GROUPS) at += sizes[i];
    }
    l->groups.splits = l->groups.dtype == GMM_I64 ? t_in(wide, count * sizeof wide[0])
                                                  : t_in(narrow, count * sizeof narrow[0]);
}

/* Neither y nor the fault word has changed. */
static void untouched(const layer *l) {
    char after[ROWS * N * 4];
    uint32_t fault;
    t_download(after, l->y.data, sizeof after);
    t_download(&fault, l->fault, sizeof fault);
    t_same("y of a refused call", after, l->before, sizeof after);
    T_CHECK(fault == 0, "fault word %u", (unsigned)fault);
}

static const char *const rules[] = { "must be", "the sum exceeds the capacity 700", "breaks the promise row_align 2" };

/* A fault in one group, at the ends of the parts in which a split is read. */
static void split(int arg) {
    static const int64_t bad[] = { -3, ROWS + 2, 1 }, where[] = { 0, 255, 256, GROUPS - 1 };
    gmm_context *ctx = verifying();
    int64_t sizes[GROUPS];
    layer l;
    build(&l, arg & 1 ? GMM_SPLIT_OFFSETS : GMM_SPLIT_SIZES, arg & 2 ? GMM_I64 : GMM_I32);
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < 4; i++) {
            char group[32];
            usual(sizes);
            sizes[where[i]] = bad[k];
            put(&l, sizes);
            (void)snprintf(group, sizeof group, "of group %d:", (int)where[i]);
            t_about("fault %d of group %d", k, (int)where[i]);
            T_REFUSED_TEXT(GMM_E_SPLIT, gmm_linear_fwd(ctx, &l.d, l.workspace, l.bytes, T.stream), gmm_last_error(ctx),
                           "gmm_linear_fwd: linear.groups.splits", group, rules[k], NULL);
            untouched(&l);
        }
}

/* A sound split gives the bits of a context that does not verify. */
static void sound(int arg) {
    gmm_context *ctx = verifying();
    static char want[ROWS * N * 4], got[ROWS * N * 4];
    int64_t sizes[GROUPS];
    layer l;
    build(&l, arg & 1 ? GMM_SPLIT_OFFSETS : GMM_SPLIT_SIZES, arg & 2 ? GMM_I64 : GMM_I32);
    usual(sizes);
    put(&l, sizes);
    T_OK(gmm_linear_fwd(T.ctx, &l.d, l.workspace, l.bytes, T.stream));
    t_download(want, l.y.data, sizeof want);
    t_upload(l.y.data, l.before, sizeof l.before);
    T_OK_TEXT(gmm_linear_fwd(ctx, &l.d, l.workspace, l.bytes, T.stream), gmm_last_error(ctx));
    t_download(got, l.y.data, sizeof got);
    t_same("y", got, want, sizeof got);
    T_CHECK(memcmp(got, l.before, sizeof got), "y was not computed");
}

/* The index of a cast's rows. */
static void cast_index(int arg) {
    gmm_context *ctx = verifying();
    enum { INDEX_ROWS = 40, DIV = 3 };
    const gmm_format format = gmm_recipe_of(GMM_RECIPE_FP8_BLOCK).input;
    static int64_t sizes[GROUPS];
    int32_t at[ROWS];
    gmm_quantization d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_layout size = GMM_ZERO;
    gmm_mat copy;
    void *workspace;
    layer l;
    (void)arg;
    build(&l, GMM_SPLIT_SIZES, GMM_I32);
    for (int g = 0; g < GROUPS; g++) sizes[g] = 2;
    put(&l, sizes);
    for (int i = 0; i < ROWS; i++) at[i] = i % (INDEX_ROWS * DIV);
    at[123] = INDEX_ROWS * DIV;
    T_CHECK(gmm_layout_of_groups(format.dtype, format.scaling, format.order, GMM_ROWWISE, GROUPS, ROWS, K, &size,
                                 NULL) == GMM_OK, "layout");
    copy = gmm_mat_quantized(&format, GMM_ROWWISE, t_alloc((size_t)size.data_bytes), t_alloc((size_t)size.scale_bytes),
                             NULL);
    d.groups = &l.groups;
    d.cols = K;
    d.format = &format;
    d.src = &l.x;
    d.rowwise = &copy;
    d.src_index = (const int32_t *)t_in(at, sizeof at);
    d.index_rows = INDEX_ROWS;
    d.index_div = DIV;
    T_OK_TEXT(gmm_quantize_query(ctx, GMM_OP_QUANTIZE, &d, &info), gmm_last_error(ctx));
    workspace = t_workspace(info.workspace_bytes);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_quantize(ctx, &d, workspace, info.workspace_bytes, T.stream), gmm_last_error(ctx),
                   "gmm_quantize: quantization.src_index", "[123] is 120", NULL);
    untouched(&l);
}

/* Without it a call does not look at the split: the fault is a bit, or for the CPU, without a fault word, a status. */
static void without(int arg) {
    int64_t sizes[GROUPS];
    uint32_t fault;
    layer l;
    (void)arg;
    build(&l, GMM_SPLIT_SIZES, GMM_I32);
    usual(sizes);
    sizes[7] = -3;
    put(&l, sizes);
    T_OK(gmm_linear_fwd(T.ctx, &l.d, l.workspace, l.bytes, T.stream));
    t_download(&fault, l.fault, sizeof fault);
    T_CHECK(fault & GMM_FAULT_NEGATIVE, "fault word %u", (unsigned)fault);
}

/* Indices of gathered rows; what stands in them behind the live rows is not read. arg 1: an entry past the matrix, 2:
   on a split on the host, 3: in dy_index. */
static void indices(int arg) {
    gmm_context *ctx = verifying();
    enum { LIVE = 2 * GROUPS, INDEX_ROWS = 40, DIV = 3, BAD = 597 };
    static const char *const needle[] = { "", "gmm_linear_fwd: linear.x_index", "gmm_linear_fwd: linear.x_index",
                                          "gmm_linear_dgrad: linear.dy_index" };
    gmm_status (*const call)(gmm_context *, const gmm_linear *, void *, size_t, gmm_stream) =
        arg == 3 ? gmm_linear_dgrad : gmm_linear_fwd;
    static int64_t sizes[GROUPS];
    gmm_info info = GMM_ZERO;
    int32_t at[ROWS];
    layer l;
    build(&l, GMM_SPLIT_SIZES, GMM_I64);
    for (int g = 0; g < GROUPS; g++) sizes[g] = 2;
    put(&l, sizes);
    if (arg == 2) {
        l.groups.splits = sizes;
        l.groups.on_host = 1;
    }
    for (int i = 0; i < ROWS; i++) at[i] = i % 6 == 0 ? -i - 1 : i % (INDEX_ROWS * DIV);
    for (int i = LIVE; i < ROWS; i++) at[i] = INDEX_ROWS * DIV; /* not live */
    if (arg) at[BAD] = INDEX_ROWS * DIV;
    l.d.index_rows = INDEX_ROWS;
    l.d.index_div = DIV;
    if (arg == 3) { /* y and x hold as many elements as dy and dx need */
        l.d.dy = &l.x;
        l.d.dx = &l.y;
        l.d.in_features = N;
        l.d.out_features = K;
        l.d.dy_index = (const int32_t *)t_in(at, sizeof at);
    } else l.d.x_index = (const int32_t *)t_in(at, sizeof at);
    T_OK_TEXT(gmm_linear_query(ctx, arg == 3 ? GMM_OP_LINEAR_DGRAD : GMM_OP_LINEAR_FWD, &l.d, &info),
              gmm_last_error(ctx));
    l.bytes = info.workspace_bytes;
    l.workspace = t_workspace(l.bytes);
    if (arg) {
        T_REFUSED_TEXT(GMM_E_ARG, call(ctx, &l.d, l.workspace, l.bytes, T.stream), gmm_last_error(ctx), needle[arg],
                       "[597] is 120", "must be negative, or below index_rows times index_div, 120", NULL);
        untouched(&l);
    } else T_OK_TEXT(call(ctx, &l.d, l.workspace, l.bytes, T.stream), gmm_last_error(ctx));
}

/* The maps of a permutation; what stands in slot_of behind the live rows is not read. */
static void maps(int arg) {
    enum { TOKENS = 160, TOPK = 2, EXPERTS = 4, HIDDEN = 3, SLOTS = TOKENS * TOPK, MORE = SLOTS + 8 };
    static float x[TOKENS * HIDDEN];
    gmm_context *ctx = verifying();
    int32_t indices[SLOTS], slot_of[MORE], row_of[SLOTS], sizes[EXPERTS] = { SLOTS, 0, 0, 0 };
    gmm_permute p = GMM_ZERO;
    void *workspace = t_workspace(1 << 20);
    const gmm_mat mx = gmm_mat_packed(GMM_F32, t_in(x, sizeof x));
    const gmm_mat rows = gmm_mat_packed(GMM_F32, t_alloc(MORE * HIDDEN * 4));
    const gmm_mat out = gmm_mat_packed(GMM_F32, t_alloc(sizeof x));
    for (int i = 0; i < SLOTS; i++) indices[i] = 0, slot_of[i] = row_of[i] = i;
    for (int i = SLOTS; i < MORE; i++) slot_of[i] = SLOTS + 99; /* not live */
    if (arg == 1) indices[300] = EXPERTS;
    if (arg == 2) slot_of[SLOTS - 1] = SLOTS;
    if (arg == 3) row_of[0] = -2;
    p.experts = EXPERTS, p.tokens = TOKENS, p.capacity = MORE, p.hidden = HIDDEN, p.topk = TOPK;
    p.indices = (const int32_t *)t_in(indices, sizeof indices);
    if (arg < 2) {
        p.row_of = (int32_t *)t_alloc(sizeof row_of);
        p.slot_of = (int32_t *)t_alloc(sizeof slot_of);
        p.sizes = (int32_t *)t_alloc(sizeof sizes);
        if (arg)
            T_REFUSED_TEXT(GMM_E_ARG, gmm_permute_map(ctx, &p, workspace, 1 << 20, T.stream), gmm_last_error(ctx),
                           "gmm_permute_map: permute.indices", "[300] is 4", "below 4", NULL);
        else T_OK_TEXT(gmm_permute_map(ctx, &p, workspace, 1 << 20, T.stream), gmm_last_error(ctx));
        return;
    }
    p.slot_of = (int32_t *)t_in(slot_of, sizeof slot_of);
    p.row_of = (int32_t *)t_in(row_of, sizeof row_of);
    p.sizes = (int32_t *)t_in(sizes, sizeof sizes);
    p.rows = &rows;
    if (arg == 3) {
        p.out = &out;
        T_REFUSED_TEXT(GMM_E_ARG, gmm_unpermute_fwd(ctx, &p, workspace, 1 << 20, T.stream), gmm_last_error(ctx),
                       "gmm_unpermute_fwd: permute.row_of", "[0] is -2", NULL);
        return;
    }
    p.x = &mx;
    if (arg == 2)
        T_REFUSED_TEXT(GMM_E_ARG, gmm_permute_fwd(ctx, &p, workspace, 1 << 20, T.stream), gmm_last_error(ctx),
                       "gmm_permute_fwd: permute.slot_of", "[319] is 320", "below 320", NULL);
    else T_OK_TEXT(gmm_permute_fwd(ctx, &p, workspace, 1 << 20, T.stream), gmm_last_error(ctx));
}

/* A table of weights in device memory, one of them not at a multiple of 16 bytes: WGMMA refuses it, MMA serves it. */
static void table(int arg) {
    gmm_context *ctx = verifying();
    enum { G = 3 };
    const int32_t sizes[G] = { 4, 4, 4 };
    void *weights[G];
    static uint16_t zeros[64 * 64 + 8];
    gmm_groups groups = GMM_ZERO;
    gmm_linear d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    void *workspace;
    const gmm_mat x = gmm_mat_packed(GMM_BF16, t_in(zeros, 12 * 64 * 2));
    const gmm_mat y = gmm_mat_packed(GMM_BF16, t_alloc(12 * 64 * 2));
    gmm_mat w;
    for (int g = 0; g < G; g++) weights[g] = (char *)t_in(zeros, sizeof zeros) + (arg && g == 1 ? 8 : 0);
    w = gmm_mat_table(GMM_BF16, (void *const *)t_in(weights, sizeof weights), 0);
    groups.count = G, groups.capacity = 12, groups.splits = t_in(sizes, sizeof sizes), groups.dtype = GMM_I32;
    d.groups = &groups, d.in_features = d.out_features = 64, d.x = &x, d.w = &w, d.y = &y;
    T_OK(gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, &d, &info));
    workspace = t_workspace(info.workspace_bytes);
    if (arg && info.engine == GMM_ENGINE_WGMMA)
        T_REFUSED_TEXT(GMM_E_ALIGN, gmm_linear_fwd(ctx, &d, workspace, info.workspace_bytes, T.stream),
                       gmm_last_error(ctx), "gmm_linear_fwd: linear.w.table", "[1] is ", "16 bytes", NULL);
    else T_OK_TEXT(gmm_linear_fwd(ctx, &d, workspace, info.workspace_bytes, T.stream), gmm_last_error(ctx));
}

/* An MLP, whose steps are verified too, gives the bits of a context that does not verify; a faulty split is refused
   before its first step. */
static void mlp(int arg) {
    enum { G = 3, T_ROWS = 24, H = 64, F = 32, Y = T_ROWS * H };
    static const int32_t sizes[2][G] = { { 9, 0, 12 }, { 9, 0, 16 } };
    static uint16_t values[G * 2 * F * H], want[Y], got[Y], before[Y];
    const gmm_recipe recipe = gmm_recipe_of(GMM_RECIPE_FP8_BLOCK);
    gmm_context *ctx = verifying();
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_mlp_quant quant = GMM_ZERO;
    gmm_mlp d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    void *workspace;
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) values[i] = gmm_f32_to_bf16((float)t_int(-8, 8) / 8);
    const gmm_mat x = gmm_mat_packed(GMM_BF16, t_in(values, Y * 2)), y = gmm_mat_packed(GMM_BF16, t_alloc(Y * 2));
    const gmm_mat w1 = gmm_mat_packed(GMM_BF16, t_in(values, G * 2 * F * H * 2));
    const gmm_mat w2 = gmm_mat_packed(GMM_BF16, t_in(values, G * F * H * 2));
    groups.count = G, groups.capacity = T_ROWS, groups.splits = t_in(sizes[0], sizeof sizes[0]);
    groups.dtype = GMM_I32;
    config.hidden = H, config.ffn = F, config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    d.config = &config, d.groups = &groups, d.x = &x, d.w1 = &w1, d.w2 = &w2, d.y = &y;
    if (arg) {
        config.recipe = recipe.kind;
        quant.recipe = &recipe;
        d.quant = &quant;
    }
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &d, &info));
    workspace = t_workspace(info.workspace_bytes);
    t_download(before, y.data, sizeof before);
    T_OK(gmm_mlp_fwd(T.ctx, &d, workspace, info.workspace_bytes, T.stream));
    t_download(want, y.data, sizeof want);
    t_upload(y.data, before, sizeof before);
    T_OK_TEXT(gmm_mlp_fwd(ctx, &d, workspace, info.workspace_bytes, T.stream), gmm_last_error(ctx));
    t_download(got, y.data, sizeof got);
    t_same("y", got, want, sizeof got);
    T_CHECK(memcmp(got, before, sizeof got), "y was not computed");
    groups.splits = t_in(sizes[1], sizeof sizes[1]);
    t_upload(y.data, before, sizeof before);
    T_REFUSED_TEXT(GMM_E_SPLIT, gmm_mlp_fwd(ctx, &d, workspace, info.workspace_bytes, T.stream), gmm_last_error(ctx),
                   "gmm_mlp_fwd: mlp.groups.splits", "size 16 of group 2", NULL);
    t_download(got, y.data, sizeof got);
    t_same("y of a refused call", got, before, sizeof got);
}

#ifdef HAVE_CUDA
/* A capture neither waits nor reads: the call becomes part of the graph. */
static void capture(int arg) {
    gmm_context *ctx = verifying();
    int64_t sizes[GROUPS];
    const char *error;
    gmm_status s;
    int kernels, named;
    layer l;
    (void)arg;
    build(&l, GMM_SPLIT_SIZES, GMM_I32);
    for (int g = 0; g < GROUPS; g++) sizes[g] = -1;
    put(&l, sizes);
    T_CHECK(!(error = device_begin_capture()), "begin: %s", error);
    s = gmm_linear_fwd(ctx, &l.d, l.workspace, l.bytes, T.stream);
    error = device_end_capture_counted("gmm_", &kernels, &named);
    T_CHECK(s == GMM_OK && !error && named > 0, "%s %s, %d kernels", gmm_last_error(ctx), error ? error : "", named);
}
#endif

void tests_verify(void) {
    for (int i = 0; i < 4; i++) {
        const char *form = i & 1 ? "offsets" : "sizes", *dtype = i & 2 ? "int64" : "int32";
        t_add(split, i, "verify faulty %s %s", form, dtype);
        t_add(sound, i, "verify sound %s %s", form, dtype);
        t_add(maps, i, "verify maps of permute, %s", ((const char *[]){"sound", "indices", "slot_of", "row_of"})[i]);
    }
    for (int i = 0; i < 4; i++)
        t_add(indices, i, "verify gathered rows, %s",
              ((const char *[]){"sound", "x_index", "x_index and a split on the host", "dy_index"})[i]);
    t_add(cast_index, 0, "verify gathered rows of a cast");
    t_add(maps, 4, "verify maps of permute, behind live rows");
    t_add(without, 0, "verify off");
    for (int i = 0; i < 2; i++) t_add(mlp, i, "verify mlp_fwd%s", i ? " fp8" : "");
    for (int i = 0; i < 2; i++) t_add_gpu(table, i, "verify table of weights, %s", i ? "misaligned" : "aligned");
#ifdef HAVE_CUDA
    t_add_gpu(capture, 0, "verify while capturing");
#endif
}
