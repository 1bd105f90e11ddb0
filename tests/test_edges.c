/* test_edges.c - no kernel touches memory beside its operands: each of them lies alone in mapped memory, and ends or
   begins where pages that are not mapped do. The results are those of operands in the harness's arena. GPU; the CPU
   engine's buffers always end so. */
#include "linear_case.h"

#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"

/* A copy of `bytes` of device memory at an edge. */
static void *edge_of(const void *from, size_t bytes, int at_end) {
    const char *why = "no bytes";
    void *to = bytes ? device_edge(bytes, at_end, &why) : NULL;
    if (!to) T_FAIL("no memory at an edge: %s", why);
    device_copy(to, from, bytes);
    return to;
}
static gmm_mat edge_mat(const t_mat *m, int at_end) {
    gmm_mat copy = m->mat;
    copy.data = edge_of(m->data, (size_t)(m->count * m->rows * m->cols * ref_bytes(m->dtype)), at_end);
    return copy;
}
/* The same call with every operand at the end, then at the beginning of its mapping. */
static void compare(const lin_run *r) {
    const size_t bytes = (size_t)(r->out.count * r->out.rows * r->out.cols * ref_bytes(r->out.dtype));
    const void *want = t_mat_bits(&r->out);
    for (int at_end = 0; at_end < 2; at_end++) {
        gmm_linear d = r->d;
        gmm_mat x, w, dy, out;
        gmm_grad grad = r->grad;
        t_poison(r->out.data, 0xFF, bytes);
        if (d.x) x = edge_mat(&r->x, at_end), d.x = &x;
        if (d.w) w = edge_mat(&r->w, at_end), d.w = &w;
        if (d.dy) dy = edge_mat(&r->dy, at_end), d.dy = &dy;
        out = edge_mat(&r->out, at_end);
        grad.mat = &out;
        if (d.y) d.y = &out;
        if (d.dx) d.dx = &out;
        if (d.dw) d.dw = &grad;
        T_OK(t_linear(T.ctx, r->spec.op, &d));
        device_copy(r->out.data, out.data, bytes);
        t_same(at_end ? "operands at the end of mapped memory" : "operands at its beginning", t_mat_bits(&r->out), want,
               bytes);
        device_edges_free();
    }
}
#define compare(...) T_CALL(compare, __VA_ARGS__)

static const gmm_op ops[] = {GMM_OP_LINEAR_FWD, GMM_OP_LINEAR_DGRAD, GMM_OP_LINEAR_WGRAD};
static const gmm_dtype dtypes[] = {GMM_BF16, GMM_F16, GMM_F32};
static const int rests[] = {1, 63, 64, 127}; /* rows of the last tile */

/* The argument of a case: a row of each table. */
static int case_arg(int rest, int op, int dtype) { return (rest * 3 + op) * 3 + dtype; }
static int rest_of(int arg) { return rests[arg / 9]; }
static gmm_op op_of(int arg) { return ops[arg / 3 % 3]; }
static gmm_dtype dtype_of(int arg) { return dtypes[arg % 3]; }

/* Last tiles of 1, 63, 64 and 127 rows, and of as many columns and further multiples of 8, which WGMMA needs. The first
   and the last group are empty or not. */
static void linear(int arg) {
    const int64_t rest = rest_of(arg);
    int64_t sizes[4] = {0, 129, rest, 0};
    lin_run r;
    for (int k = 0; k < 4; k++) {
        lin_spec s = {.op = op_of(arg), .in = dtype_of(arg), .out = dtype_of(arg), .groups = 4, .K = 128 + 8,
                      .N = 128 + rest, .sizes = sizes, .fill = T_REALS};
        if (k % 2) s.N = 256 + (rest + 7) / 8 * 8, s.K = 64 + (rest + 7) / 8 * 8;
        sizes[0] = k / 2 ? 5 : 0;
        sizes[3] = k / 2 ? rest : 0;
        lin_build(&r, &s);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        lin_check(&r);
        compare(&r);
    }
}

/* wgrad with a shape at which another library's kernel hangs. */
static void two_groups(int arg) {
    static const int64_t sizes[] = {384, 256};
    const lin_spec s = {.op = GMM_OP_LINEAR_WGRAD, .in = GMM_BF16, .out = arg ? GMM_F32 : GMM_BF16, .groups = 2,
                        .K = 1408, .N = 1408, .sizes = sizes, .fill = T_INTS};
    lin_run r;
    lin_build(&r, &s);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
}

/* Products of copies quantized by 1x128 and 128x128: codes and scales at an edge each. */
typedef struct operand {
    gmm_format format;
    size_t data_bytes, scale_bytes;
    gmm_mat copy, edge;
} operand;
static void quantize(operand *o, const gmm_groups *groups, const gmm_format *format, gmm_direction direction,
                     const gmm_mat *src, int64_t count, int64_t rows, int64_t cols) {
    gmm_quantization d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_layout l = GMM_ZERO;
    o->format = *format;
    if (count)
        T_OK_TEXT(gmm_layout_of(format->dtype, format->scaling, format->order, direction, rows, cols, &l, NULL), "");
    else
        T_OK_TEXT(gmm_layout_of_groups(format->dtype, format->scaling, format->order, direction, groups->count,
                                       groups->capacity, cols, &l, NULL), "");
    o->data_bytes = (size_t)(l.data_bytes * (count ? count : 1));
    o->scale_bytes = (size_t)(l.scale_bytes * (count ? count : 1));
    o->copy = gmm_mat_quantized(&o->format, direction, t_alloc(o->data_bytes), t_alloc(o->scale_bytes), NULL);
    d.groups = count ? NULL : groups;
    d.count = count;
    d.rows = count ? rows : 0;
    d.cols = cols;
    d.format = &o->format;
    d.src = src;
    if (direction == GMM_COLUMNWISE) d.columnwise = &o->copy;
    else d.rowwise = &o->copy;
    T_OK(gmm_quantize_query(T.ctx, GMM_OP_QUANTIZE, &d, &info));
    T_OK(gmm_quantize(T.ctx, &d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
}
static void move(operand *o, int at_end) {
    o->edge = o->copy;
    o->edge.data = edge_of(o->copy.data, o->data_bytes, at_end);
    o->edge.scale = edge_of(o->copy.scale, o->scale_bytes, at_end);
}
static void fp8(int arg) {
    const gmm_op op = op_of(arg);
    const int wgrad = op == GMM_OP_LINEAR_WGRAD;
    const int64_t sizes[4] = {0, 130, rest_of(arg), 0}, K = 256, N = 384;
    const gmm_recipe recipe = gmm_recipe_of(GMM_RECIPE_FP8_BLOCK);
    const lin_spec s = {.op = op, .in = GMM_BF16, .out = GMM_BF16, .groups = 4, .K = K, .N = N, .sizes = sizes,
                        .fill = T_REALS};
    const int64_t in = op == GMM_OP_LINEAR_DGRAD ? N : K;
    operand a, b, columns;
    lin_run r;
    const void *want = NULL;
    size_t bytes;
    lin_build(&r, &s);
    bytes = (size_t)(r.out.count * r.out.rows * r.out.cols * ref_bytes(r.out.dtype));
    if (wgrad) {
        quantize(&a, &r.groups, &recipe.input, GMM_COLUMNWISE, r.d.x, 0, 0, K);
        quantize(&b, &r.groups, &recipe.grad, GMM_COLUMNWISE, r.d.dy, 0, 0, N);
    } else {
        quantize(&a, &r.groups, op == GMM_OP_LINEAR_FWD ? &recipe.input : &recipe.grad, GMM_ROWWISE,
                 op == GMM_OP_LINEAR_FWD ? r.d.x : r.d.dy, 0, 0, in);
        quantize(&b, &r.groups, &recipe.weight, GMM_ROWWISE, r.d.w, 4, N, K);
        quantize(&columns, &r.groups, &recipe.weight, GMM_COLUMNWISE, r.d.w, 4, N, K);
    }
    for (int at_end = -1; at_end < 2; at_end++) {
        gmm_linear d = r.d;
        gmm_mat *const pa = at_end < 0 ? &a.copy : &a.edge, *const pb = at_end < 0 ? &b.copy : &b.edge;
        gmm_mat out = r.out.mat, x, dy;
        gmm_grad grad = r.grad;
        if (at_end >= 0) {
            move(&a, at_end);
            move(&b, at_end);
            if (!wgrad) move(&columns, at_end);
            t_poison(r.out.data, 0xFF, bytes);
            out.data = edge_of(r.out.data, bytes, at_end);
        }
        if (!wgrad) pb->columnwise = at_end < 0 ? &columns.copy : &columns.edge;
        grad.mat = &out;
        if (wgrad) { /* linear_wgrad reads the columnwise copies of both */
            x = *pa;
            dy = *pb;
            x.columnwise = pa;
            dy.columnwise = pb;
        }
        if (d.x) d.x = wgrad ? &x : pa;
        if (d.w) d.w = pb;
        if (d.dy) d.dy = wgrad ? &dy : pa;
        if (d.y) d.y = &out;
        if (d.dx) d.dx = &out;
        if (d.dw) d.dw = &grad;
        T_OK(t_linear(T.ctx, op, &d));
        if (at_end < 0) {
            want = t_mat_bits(&r.out);
            continue;
        }
        device_copy(r.out.data, out.data, bytes);
        t_same(at_end ? "operands at the end of mapped memory" : "operands at its beginning", t_mat_bits(&r.out), want,
               bytes);
        device_edges_free();
    }
}
#endif

void tests_edges(void) {
#ifdef HAVE_CUDA
    static const char *const names[] = {"fwd", "dgrad", "wgrad"};
    for (int rest = 0; rest < 4; rest++)
        for (int op = 0; op < 3; op++)
            for (int dtype = 0; dtype < 3; dtype++)
                t_add_gpu(linear, case_arg(rest, op, dtype), "edges of memory, linear %s %s, last tile of %d",
                          names[op], gmm_dtype_name(dtypes[dtype]), rests[rest]);
    for (int rest = 0; rest < 4; rest++)
        for (int op = 0; op < 3; op++)
            t_add_gpu(fp8, case_arg(rest, op, 0), "edges of memory, fp8 1x128 %s, last tile of %d", names[op],
                      rests[rest]);
    for (int k = 0; k < 2; k++) t_add_gpu(two_groups, k, "edges wgrad of 384 and 256 rows into %s", k ? "f32" : "bf16");
#endif
}
