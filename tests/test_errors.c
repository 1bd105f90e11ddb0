/* test_errors.c - violates every rule of a linear call: each call returns its status and a message with function,
   argument (descriptor name and field, as declared) and value; it enqueues and writes nothing. */
#include "linear_case.h"

#ifdef HAVE_CUDA
#include "device.h"
#endif

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FWD = 1, DGRAD = 2, WGRAD = 4, BGRAD = 8, ALL = 15 };

static const char *const functions[] = {"gmm_linear_fwd", "gmm_linear_dgrad", "gmm_linear_wgrad", "gmm_linear_bgrad"};

/* A valid call, which a violation changes. */
typedef struct bad_call {
    lin_run r;
    int op;               /* 0 to 3 */
    gmm_linear *d;
    gmm_linear *linear;   /* the argument of the call: d or NULL */
    void *workspace;
    size_t bytes;
    gmm_stream stream;
    gmm_context *ctx;
    gmm_mat *act, *weight; /* an activation that the operation reads, and w or the gradient's matrix */
    const char *act_name, *weight_name, *grad_name;
    int64_t act_cols;
    /* what is expected */
    gmm_status want;
    int query;            /* the query refuses it too */
    char needle[5][80];
    int needles;
} bad_call;

static void expect(bad_call *b, gmm_status want, int query) {
    b->want = want;
    b->query = query;
    b->needles = 0;
}
static void needle(bad_call *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void needle(bad_call *b, const char *format, ...) {
    va_list list;
    va_start(list, format);
    (void)vsnprintf(b->needle[b->needles++], sizeof b->needle[0], format, list);
    va_end(list);
}
static void shapes(bad_call *b) { /* the message must contain the shapes of the call */
    needle(b, "K=17");
}

/* Each violation changes the call, and sets the expected status and strings of the message. */
#define VIOLATIONS(X) \
    X(linear_null, ALL) X(context_null, ALL) X(groups_null, ALL) X(in_zero, ALL) X(in_negative, ALL) X(out_zero, ALL) \
    X(out_negative, ALL) X(count_zero, ALL) X(count_negative, ALL) X(capacity_negative, ALL) X(splits_null, ALL) \
    X(splits_dtype, ALL) X(splits_dtype_none, ALL) X(form_unknown, ALL) X(tail_unknown, ALL) X(align_negative, ALL) \
    X(splits_misaligned, ALL) X(splits64_misaligned, ALL) X(fault_misaligned, ALL) \
    X(act_null, ALL) X(w_null, FWD | DGRAD) X(y_null, FWD) X(dx_null, DGRAD) X(dy_null_wgrad, WGRAD) \
    X(grad_null, WGRAD | BGRAD) X(grad_mat_null, WGRAD | BGRAD) X(bias_null, BGRAD) \
    X(act_no_memory, ALL) X(weight_no_memory, FWD | DGRAD | WGRAD) X(out_no_memory, ALL) X(bias_no_memory, FWD) \
    X(act_table, ALL) X(weight_both, FWD | DGRAD | WGRAD | BGRAD) X(table_entry_null, ALL) \
    X(act_dtype, ALL) X(act_dtype_none, ALL) X(act_dtype_unknown, ALL) X(act_dtype_int, ALL) \
    X(weight_dtype, ALL) X(out_dtype, FWD | DGRAD) X(bias_dtype, FWD) X(mixed_dtypes, FWD | DGRAD | WGRAD) \
    X(act_scaling, ALL) X(weight_scaling, ALL) X(weight_flags, ALL) X(weight_amax_flag, ALL) \
    X(act_ld, ALL) X(act_ld_negative, ALL) X(weight_ld, FWD | DGRAD | WGRAD) X(out_ld, FWD | DGRAD) \
    X(stride_small, FWD | DGRAD | WGRAD) X(stride_negative, ALL) X(stride_on_act, ALL) X(stride_on_table, ALL) \
    X(act_misaligned, ALL) X(weight_misaligned, ALL) X(out_misaligned, FWD | DGRAD) X(table_misaligned, ALL) \
    X(entry_misaligned, ALL) X(scale_misaligned, FWD | BGRAD) X(prob_misaligned, FWD | DGRAD) \
    X(prob_refused, WGRAD | BGRAD) X(x_index_misaligned, FWD | WGRAD) X(dy_index_misaligned, DGRAD | WGRAD | BGRAD) \
    X(index_rows_negative, ALL) X(index_rows_large, ALL) X(index_div_negative, ALL) X(linear_reserved, ALL) \
    X(alpha_misaligned, FWD | DGRAD | WGRAD) X(beta_misaligned, WGRAD | BGRAD) \
    X(dscale_misaligned, BGRAD) \
    X(act_overflow, ALL) X(capacity_overflow, ALL) X(weight_overflow, FWD | DGRAD | WGRAD) X(stride_overflow, ALL) \
    X(features_overflow, FWD | DGRAD | WGRAD) \
    X(main_grad_two, WGRAD | BGRAD) X(overwrite_negative, WGRAD | BGRAD) \
    X(host_negative, ALL) X(host_sum, ALL) X(host_sum_wraps, ALL) X(host_falling, ALL) X(host_first, ALL) \
    X(host_promise, ALL) \
    X(workspace_short, ALL) X(workspace_zero, ALL) X(workspace_null, ALL) X(workspace_misaligned, ALL) \
    X(workspace_at_128, ALL) X(stream_set, ALL) \
    X(engine_mma, ALL) X(engine_wgmma, ALL) X(engine_cublaslt, ALL) X(engine_unknown, ALL) X(engine_negative, ALL) \
    X(sm_limit_negative, ALL) X(nondeterminism_two, ALL) \
    X(linear_newer, ALL) X(groups_newer, ALL) X(options_newer, ALL) X(act_newer, ALL) X(weight_newer, ALL) \
    X(grad_newer, WGRAD | BGRAD) X(linear_tiny, ALL)

static void linear_null(bad_call *b) { b->linear = NULL; expect(b, GMM_E_NULL, 1); needle(b, ": linear is NULL"); }
static void context_null(bad_call *b) { b->ctx = NULL; expect(b, GMM_E_NULL, 1); }
static void groups_null(bad_call *b) {
    b->d->groups = NULL;
    expect(b, GMM_E_NULL, 1);
    needle(b, ": linear.groups is NULL");
}
static void in_zero(bad_call *b) {
    b->d->in_features = 0;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.in_features: 0");
}
static void in_negative(bad_call *b) {
    b->d->in_features = -41;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.in_features: -41");
}
static void out_zero(bad_call *b) {
    b->d->out_features = 0;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.out_features: 0");
}
static void out_negative(bad_call *b) {
    b->d->out_features = INT64_MIN;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.out_features: -9223372036854775808");
}
static void count_zero(bad_call *b) {
    b->r.groups.count = 0;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.groups.count: 0");
}
static void count_negative(bad_call *b) {
    b->r.groups.count = -6;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.groups.count: -6");
}
static void capacity_negative(bad_call *b) {
    b->r.groups.capacity = -34;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.groups.capacity: -34");
}
static void splits_null(bad_call *b) {
    b->r.groups.splits = NULL;
    expect(b, GMM_E_NULL, 0);
    needle(b, ": linear.groups.splits is NULL with 4 groups");
}
static void splits_dtype(bad_call *b) {
    b->r.groups.dtype = GMM_F32;
    expect(b, GMM_E_DTYPE, 1);
    needle(b, ": linear.groups.dtype: f32");
}
static void splits_dtype_none(bad_call *b) {
    b->r.groups.dtype = GMM_NONE;
    expect(b, GMM_E_DTYPE, 1);
    needle(b, ": linear.groups.dtype: none");
}
static void form_unknown(bad_call *b) {
    b->r.groups.form = (gmm_split_form)2;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.groups.form: 2");
}
static void tail_unknown(bad_call *b) {
    b->r.groups.tail = (gmm_tail)-3;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.groups.tail: -3");
}
static void align_negative(bad_call *b) {
    b->r.groups.row_align = -8;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.groups.row_align: -8");
}
static void splits_misaligned(bad_call *b) {
    b->r.groups.splits = (const char *)b->r.groups.splits + 2;
    expect(b, GMM_E_ALIGN, 0);
    needle(b, ": linear.groups.splits: %p", (void *)(uintptr_t)b->r.groups.splits);
}
static void splits64_misaligned(bad_call *b) {
    b->r.groups.dtype = GMM_I64;
    b->r.groups.splits = (const char *)t_alloc(64) + 4;
    expect(b, GMM_E_ALIGN, 0);
    needle(b, ": linear.groups.splits: %p", (void *)(uintptr_t)b->r.groups.splits);
}
static void fault_misaligned(bad_call *b) {
    b->r.groups.fault = (uint32_t *)(void *)((char *)b->r.fault + 1);
    expect(b, GMM_E_ALIGN, 0);
    needle(b, ": linear.groups.fault: %p", (void *)b->r.groups.fault);
}
static void act_null(bad_call *b) {
    if (b->op == 0) b->d->x = NULL;
    else b->d->dy = NULL;
    expect(b, GMM_E_NULL, 1);
    needle(b, ": linear.%s is NULL: %s needs it", b->act_name, gmm_op_name((gmm_op)(GMM_OP_LINEAR_FWD + b->op)));
}
static void w_null(bad_call *b) { b->d->w = NULL; expect(b, GMM_E_NULL, 1); needle(b, ": linear.w is NULL: linear_"); }
static void y_null(bad_call *b) {
    b->d->y = NULL;
    expect(b, GMM_E_NULL, 1);
    needle(b, ": linear.y is NULL: linear_fwd needs it");
    shapes(b);
}
static void dx_null(bad_call *b) {
    b->d->dx = NULL;
    expect(b, GMM_E_NULL, 1);
    needle(b, ": linear.dx is NULL: linear_dgrad needs it");
    shapes(b);
}
static void dy_null_wgrad(bad_call *b) {
    b->d->x = NULL;
    expect(b, GMM_E_NULL, 1);
    needle(b, ": linear.x is NULL: linear_wgrad needs it");
}
static void grad_null(bad_call *b) {
    b->d->dw = b->d->db = NULL;
    expect(b, GMM_E_NULL, 1);
    needle(b, b->op == 2 ? ": linear.dw is NULL: linear_wgrad needs a destination"
                         : ": linear.db and linear.d_bias_scale are both NULL");
    shapes(b);
}
static void grad_mat_null(bad_call *b) {
    b->r.grad.mat = NULL;
    expect(b, GMM_E_NULL, 1);
    needle(b, ": linear.%s is NULL: linear_", b->weight_name);
}
static void bias_null(bad_call *b) {
    b->d->bias = NULL;
    b->d->d_bias_scale = t_floats_out(b->r.capacity);
    expect(b, GMM_E_NULL, 1);
    needle(b, ": linear.bias is NULL: linear_bgrad needs it");
}
static void no_memory(bad_call *b, gmm_mat *m, const char *name, int64_t cols) {
    m->data = NULL;
    expect(b, GMM_E_NULL, 0);
    needle(b, ": linear.%s has neither data nor table for ", name);
    needle(b, "x %lld", (long long)cols);
    shapes(b);
}
static void act_no_memory(bad_call *b) { no_memory(b, b->act, b->act_name, b->act_cols); needle(b, "29 x"); }
static void weight_no_memory(bad_call *b) { no_memory(b, b->weight, b->weight_name, 17); needle(b, "23 x"); }
static void out_no_memory(bad_call *b) {
    no_memory(b, &b->r.out.mat, b->op == 0 ? "y" : b->op == 1 ? "dx" : b->weight_name, b->r.out.cols);
}
static void bias_no_memory(bad_call *b) { no_memory(b, &b->r.bias.mat, "bias", 23); }
static void act_table(bad_call *b) {
    b->act->data = NULL;
    b->act->table = (void *const *)b->r.x.table;
    if (!b->act->table) b->act->table = (void *const *)b->r.dy.table;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.%s is one matrix and takes data, not table", b->act_name);
}
static void weight_both(bad_call *b) {
    b->weight->table = (void *const *)t_host(4 * sizeof(void *));
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.%s has both data and table", b->weight_name);
}
static void **entries(bad_call *b) { /* turns the weight or gradient into a host table */
    void **table = (void **)t_host(4 * sizeof *table);
    for (int g = 0; g < 4; g++) table[g] = b->op < 2 ? b->r.w.table[g] : b->r.out.table[g];
    b->weight->data = NULL;
    b->weight->table = (void *const *)table;
    b->weight->flags = GMM_MAT_TABLE_ON_HOST;
    return table;
}
static void table_entry_null(bad_call *b) {
    entries(b)[2] = NULL;
    expect(b, GMM_E_NULL, 0);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "table[2]");
}
static void dtype(bad_call *b, gmm_mat *m, gmm_dtype bad, const char *name, const char *text) {
    m->dtype = bad;
    expect(b, GMM_E_DTYPE, 1);
    needle(b, ": linear.%s:", name);
    needle(b, "%s", text);
    shapes(b);
}
static void act_dtype(bad_call *b) { dtype(b, b->act, GMM_E4M3, b->act_name, "e4m3"); }
static void act_dtype_none(bad_call *b) { dtype(b, b->act, GMM_NONE, b->act_name, "none"); }
static void act_dtype_unknown(bad_call *b) { dtype(b, b->act, (gmm_dtype)77, b->act_name, "dtype"); }
static void act_dtype_int(bad_call *b) { dtype(b, b->act, GMM_I32, b->act_name, "i32"); }
static void weight_dtype(bad_call *b) { dtype(b, b->weight, GMM_E5M2, b->weight_name, "e5m2"); }
static void out_dtype(bad_call *b) { dtype(b, &b->r.out.mat, GMM_I64, b->op ? "dx" : "y", "i64"); }
static void bias_dtype(bad_call *b) { dtype(b, &b->r.bias.mat, GMM_U8, "bias", "u8"); }
static void mixed_dtypes(bad_call *b) {
    gmm_mat *m = b->op == 2 ? &b->r.dy.mat : &b->r.w.mat;
    m->dtype = GMM_F16;
    m->data = t_alloc(1 << 16);
    expect(b, GMM_E_DTYPE, 1);
    needle(b, ": linear.%s:", b->op == 2 ? "dy" : "w");
    needle(b, "f16");
    needle(b, "must be that of linear.%s, bf16", b->op == 1 ? "dy" : "x");
    shapes(b);
}
static void act_scaling(bad_call *b) {
    b->act->scaling = GMM_SCALING_MX32;
    expect(b, GMM_E_DTYPE, 1);
    needle(b, ": linear.%s:", b->act_name);
    needle(b, "mx32");
}
static void weight_scaling(bad_call *b) {
    b->weight->scaling = GMM_SCALING_TENSOR;
    expect(b, GMM_E_DTYPE, 1);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "tensor");
}
static void weight_flags(bad_call *b) {
    b->weight->flags = 0x4000u;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "4000");
}
static void weight_amax_flag(bad_call *b) { /* a flag of quantized operands */
    b->weight->flags = GMM_MAT_ROW_AMAX;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "0x2");
}
static void ld(bad_call *b, gmm_mat *m, const char *name, int64_t bad, int64_t cols) {
    m->ld = bad;
    expect(b, GMM_E_STRIDE, 1);
    needle(b, ": linear.%s:", name);
    needle(b, "%lld", (long long)bad);
    needle(b, "%lld", (long long)cols);
    shapes(b);
}
static void act_ld(bad_call *b) { ld(b, b->act, b->act_name, b->act_cols - 1, b->act_cols); }
static void act_ld_negative(bad_call *b) { ld(b, b->act, b->act_name, -b->act_cols, b->act_cols); }
static void weight_ld(bad_call *b) { ld(b, b->weight, b->weight_name, 16, 17); }
static void out_ld(bad_call *b) { ld(b, &b->r.out.mat, b->op ? "dx" : "y", 3, b->op ? 17 : 23); }
static void stride_small(bad_call *b) {
    b->weight->group_stride = 23 * 17 - 1;
    expect(b, GMM_E_STRIDE, 1);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "390");
    needle(b, "391");
}
static void stride_negative(bad_call *b) {
    b->weight->group_stride = -500;
    expect(b, GMM_E_STRIDE, 1);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "-500");
}
static void stride_on_act(bad_call *b) {
    b->act->group_stride = 4321;
    expect(b, GMM_E_STRIDE, 1);
    needle(b, ": linear.%s:", b->act_name);
    needle(b, "4321");
}
static void stride_on_table(bad_call *b) {
    (void)entries(b);
    b->weight->group_stride = 4321;
    expect(b, GMM_E_STRIDE, 1);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "4321");
}
static void *odd(void *p) { return (char *)p + 1; }
static void misaligned(bad_call *b, gmm_mat *m, const char *name) {
    m->data = odd(m->data);
    expect(b, GMM_E_ALIGN, 0);
    needle(b, ": linear.%s:", name);
    needle(b, "%p", m->data);
}
static void act_misaligned(bad_call *b) { misaligned(b, b->act, b->act_name); }
static void weight_misaligned(bad_call *b) { misaligned(b, b->weight, b->weight_name); }
static void out_misaligned(bad_call *b) { misaligned(b, &b->r.out.mat, b->op ? "dx" : "y"); }
static void table_misaligned(bad_call *b) {
    (void)entries(b);
    b->weight->table = (void *const *)odd((void *)(uintptr_t)b->weight->table);
    expect(b, GMM_E_ALIGN, 0);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "%p", (void *)(uintptr_t)b->weight->table);
}
static void entry_misaligned(bad_call *b) {
    void **table = entries(b);
    table[3] = odd(table[3]);
    expect(b, GMM_E_ALIGN, 0);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "table[3]");
    needle(b, "%p", table[3]);
}
static void array(bad_call *b, const void *at, const char *name) {
    expect(b, GMM_E_ALIGN, 0);
    needle(b, ": linear.%s:", name);
    needle(b, "%p", (void *)(uintptr_t)at);
}
static const float *odd_floats(int64_t n) { return (const float *)odd(t_alloc((size_t)n * 4 + 4)); }
static void scale_misaligned(bad_call *b) { array(b, b->d->bias_scale = odd_floats(29), "bias_scale"); }
static void prob_misaligned(bad_call *b) { array(b, b->d->prob = odd_floats(29), "prob"); }
static void prob_refused(bad_call *b) {
    b->d->prob = t_floats_out(b->r.capacity);
    expect(b, GMM_E_ARG, 1);
    needle(b, "linear.prob must be NULL in");
}
static const int32_t *odd_ints(int64_t n) { return (const int32_t *)odd(t_alloc((size_t)n * 4 + 4)); }
static void x_index_misaligned(bad_call *b) { array(b, b->d->x_index = odd_ints(29), "x_index"); }
static void dy_index_misaligned(bad_call *b) { array(b, b->d->dy_index = odd_ints(29), "dy_index"); }
static void index_rows(bad_call *b, int64_t rows) {
    int32_t *index = (int32_t *)t_alloc(29 * sizeof *index);
    b->d->x_index = b->d->dy_index = index;
    b->d->index_rows = rows;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.index_rows: %lld must be 0 to 2^31 - 1", (long long)rows);
}
static void index_rows_negative(bad_call *b) { index_rows(b, -1); }
static void index_rows_large(bad_call *b) { index_rows(b, (int64_t)1 << 31); }
static void index_div_negative(bad_call *b) {
    b->d->index_div = -2;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.index_div: -2 must be >= 1, or 0 for 1");
}
static void linear_reserved(bad_call *b) {
    b->d->reserved = 5;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.reserved: 5 must be 0");
}
static void alpha_misaligned(bad_call *b) { array(b, b->d->alpha = odd_floats(4), "alpha"); }
static void beta_misaligned(bad_call *b) {
    array(b, b->r.grad.beta = odd_floats(4), b->grad_name);
    needle(b, "beta");
}
static void dscale_misaligned(bad_call *b) {
    b->d->bias = &b->r.bias.mat;
    array(b, b->d->d_bias_scale = (float *)(uintptr_t)odd_floats(29), "d_bias_scale");
}
static void act_overflow(bad_call *b) {
    b->act->ld = INT64_MAX;
    expect(b, GMM_E_OVERFLOW, 1);
    needle(b, ": linear.%s:", b->act_name);
    needle(b, "9223372036854775807");
    needle(b, "29");
}
static void capacity_overflow(bad_call *b) {
    b->r.groups.capacity = (int64_t)1 << 61;
    expect(b, GMM_E_OVERFLOW, 1);
    needle(b, ": linear.%s:", b->op == 2 ? "x" : b->act_name); /* wgrad reads x first */
    needle(b, "2305843009213693952");
}
static void weight_overflow(bad_call *b) {
    b->weight->ld = (int64_t)1 << 60;
    expect(b, GMM_E_OVERFLOW, 1);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "1152921504606846976");
}
static void stride_overflow(bad_call *b) {
    b->weight->group_stride = (int64_t)1 << 61;
    expect(b, GMM_E_OVERFLOW, 1);
    needle(b, ": linear.%s:", b->weight_name);
    needle(b, "2305843009213693952");
}
static void features_overflow(bad_call *b) {
    b->d->in_features = INT64_MAX;
    b->r.x.mat.ld = b->r.w.mat.ld = b->r.out.mat.ld = 0;
    expect(b, GMM_E_OVERFLOW, 1);
    needle(b, "9223372036854775807");
}
static void main_grad_two(bad_call *b) {
    b->r.grad.main_grad = 2;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.%s:", b->grad_name);
    needle(b, "main_grad 2");
}
static void overwrite_negative(bad_call *b) {
    b->r.grad.overwrite = -7;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.%s:", b->grad_name);
    needle(b, "overwrite -7");
}
static int64_t *host_sizes(bad_call *b, int64_t a0, int64_t a1, int64_t a2, int64_t a3, int64_t a4) {
    int64_t *v = (int64_t *)t_host(5 * sizeof *v);
    v[0] = a0;
    v[1] = a1;
    v[2] = a2;
    v[3] = a3;
    v[4] = a4;
    b->r.groups.splits = v;
    b->r.groups.dtype = GMM_I64;
    b->r.groups.on_host = 1;
    expect(b, GMM_E_SPLIT, 0);
    needle(b, ": linear.groups.splits: ");
    return v;
}
static void host_negative(bad_call *b) { (void)host_sizes(b, 5, 3, -19, 1, 0); needle(b, "-19"); needle(b, "group 2"); }
static void host_sum(bad_call *b) { (void)host_sizes(b, 5, 3, 6, 16, 0); needle(b, "16"); needle(b, "29"); }
static void host_sum_wraps(bad_call *b) {
    (void)host_sizes(b, 5, INT64_MAX, INT64_MAX, 7, 0);
    needle(b, "9223372036854775807");
    needle(b, "29");
}
static void host_falling(bad_call *b) {
    (void)host_sizes(b, 0, 9, 4, 20, 29);
    b->r.groups.form = GMM_SPLIT_OFFSETS;
    needle(b, "4");
    needle(b, "group 1");
}
static void host_first(bad_call *b) {
    (void)host_sizes(b, 6, 9, 14, 20, 29);
    b->r.groups.form = GMM_SPLIT_OFFSETS;
    needle(b, "offset");
    needle(b, "6");
}
static void host_promise(bad_call *b) {
    (void)host_sizes(b, 8, 0, 13, 8, 0);
    b->r.groups.row_align = 4;
    needle(b, "13");
    needle(b, "4");
}
static void workspace_short(bad_call *b) {
    b->bytes--;
    expect(b, GMM_E_WORKSPACE, 0);
    needle(b, ": workspace_bytes: %zu", b->bytes);
    needle(b, "%zu", b->bytes + 1);
    shapes(b);
}
static void workspace_zero(bad_call *b) {
    expect(b, GMM_E_WORKSPACE, 0);
    needle(b, ": workspace_bytes: 0");
    needle(b, "%zu", b->bytes);
    b->bytes = 0;
}
static void workspace_null(bad_call *b) {
    b->workspace = NULL;
    expect(b, GMM_E_NULL, 0);
    needle(b, ": workspace is NULL for %zu bytes", b->bytes);
}
static void workspace_misaligned(bad_call *b) {
    b->workspace = odd(t_workspace(b->bytes + 1));
    expect(b, GMM_E_ALIGN, 0);
    needle(b, ": workspace: %p", b->workspace);
    needle(b, "256");
}
static void workspace_at_128(bad_call *b) {
    b->workspace = (char *)t_workspace(b->bytes + 128) + 128;
    expect(b, GMM_E_ALIGN, 0);
    needle(b, ": workspace: %p", b->workspace);
}
static void stream_set(bad_call *b) {
    b->stream = (gmm_stream)b->workspace;
    expect(b, GMM_E_ARG, 0);
    needle(b, ": stream: %p", b->workspace);
}
static void engine(bad_call *b, int engine_asked, gmm_status want) {
    b->r.options.engine = (gmm_engine)engine_asked;
    b->d->options = &b->r.options;
    expect(b, want, 1);
    needle(b, ": linear.options.engine: ");
    if (want == GMM_E_ARG) needle(b, "%d", engine_asked);
    else needle(b, "%s", gmm_engine_name((gmm_engine)engine_asked));
}
static void engine_mma(bad_call *b) { engine(b, GMM_ENGINE_MMA, GMM_E_UNSUPPORTED); shapes(b); }
static void engine_wgmma(bad_call *b) { engine(b, GMM_ENGINE_WGMMA, GMM_E_UNSUPPORTED); }
static void engine_cublaslt(bad_call *b) { engine(b, GMM_ENGINE_CUBLASLT, GMM_E_UNSUPPORTED); }
static void engine_unknown(bad_call *b) { engine(b, 42, GMM_E_ARG); }
static void engine_negative(bad_call *b) { engine(b, -2, GMM_E_ARG); }
static void sm_limit_negative(bad_call *b) {
    b->r.options.sm_limit = -64;
    b->d->options = &b->r.options;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.options.sm_limit: -64");
}
static void nondeterminism_two(bad_call *b) {
    b->r.options.allow_nondeterminism = 2;
    b->d->options = &b->r.options;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear.options.allow_nondeterminism: 2");
}
static void newer(bad_call *b, uint32_t *size, size_t now, const char *name) {
    *size = (uint32_t)now + 8;
    expect(b, GMM_E_VERSION, 1);
    needle(b, ": linear%s%s:", *name ? "." : "", name);
    needle(b, "struct_size %u", *size);
    needle(b, "%u", (unsigned)now);
}
static void linear_newer(bad_call *b) { newer(b, &b->d->struct_size, sizeof *b->d, ""); }
static void groups_newer(bad_call *b) { newer(b, &b->r.groups.struct_size, sizeof b->r.groups, "groups"); }
static void options_newer(bad_call *b) {
    b->d->options = &b->r.options;
    newer(b, &b->r.options.struct_size, sizeof b->r.options, "options");
}
static void act_newer(bad_call *b) { newer(b, &b->act->struct_size, sizeof *b->act, b->act_name); }
static void weight_newer(bad_call *b) { newer(b, &b->weight->struct_size, sizeof *b->weight, b->weight_name); }
static void grad_newer(bad_call *b) { newer(b, &b->r.grad.struct_size, sizeof b->r.grad, b->grad_name); }
static void linear_tiny(bad_call *b) {
    b->d->struct_size = 3;
    expect(b, GMM_E_ARG, 1);
    needle(b, ": linear:");
    needle(b, "struct_size 3");
}

static const struct {
    void (*spoil)(bad_call *b);
    int ops;
    const char *name;
} violations[] = {
#define X(name, ops) {name, ops, #name},
    VIOLATIONS(X)
#undef X
};

static void prepare(bad_call *b, int op) {
    static const int64_t sizes[] = {8, 0, 9, 4};
    const lin_spec s = {.op = (gmm_op)(GMM_OP_LINEAR_FWD + op), .in = GMM_BF16, .out = op < 2 ? GMM_BF16 : GMM_F32,
                        .bias = GMM_F32, .groups = 4, .K = 17, .N = 23, .sizes = sizes, .extra = 8, .fill = T_INTS};
    gmm_info info = GMM_ZERO;
    memset(b, 0, sizeof *b);
    lin_build(&b->r, &s);
    b->op = op;
    b->d = b->linear = &b->r.d;
    b->ctx = T.ctx;
    b->stream = T.stream;
    T_OK(gmm_linear_query(T.ctx, s.op, b->d, &info));
    b->bytes = info.workspace_bytes;
    T_CHECK(b->bytes > 0, "the tests of a short workspace need one");
    b->workspace = t_workspace(b->bytes);
    b->act = op == 0 ? &b->r.x.mat : &b->r.dy.mat;
    b->act_name = op == 0 ? "x" : "dy";
    b->act_cols = op == 0 ? 17 : 23;
    b->weight = op < 2 ? &b->r.w.mat : &b->r.out.mat;
    b->weight_name = op < 2 ? "w" : op == 2 ? "dw.mat" : "db.mat";
    b->grad_name = op == 2 ? "dw" : "db";
}

static void violate(int arg) {
    bad_call b;
    const char *needles[8];
    gmm_info info = GMM_ZERO;
    gmm_status got;
    int n = 0;
    prepare(&b, arg % 4);
    violations[arg / 4].spoil(&b);
    if (T.gpu && (violations[arg / 4].spoil == stream_set || violations[arg / 4].spoil == engine_mma ||
                  violations[arg / 4].spoil == engine_wgmma || violations[arg / 4].spoil == engine_cublaslt))
        t_skip("a rule of CPU contexts");
    if (b.ctx) needles[n++] = functions[b.op];
    for (int i = 0; i < b.needles; i++) needles[n++] = b.needle[i];
    if (b.ctx && b.linear && !b.linear->struct_size) needles[n++] = "(G="; /* shapes, if the descriptor can be read */
    needles[n] = NULL;
    t_before(1, violations[arg / 4].name, __FILE__, __LINE__);
    got = t_linear_functions[b.op](b.ctx, b.linear, b.workspace, b.bytes, b.stream);
    t_refused(b.want, got, gmm_last_error(b.ctx), violations[arg / 4].name, __FILE__, __LINE__, needles);
    if (b.ctx && strlen(gmm_last_error(b.ctx)) > 500) T_FAIL("the message is cut off: %s", gmm_last_error(b.ctx));

    /* the query returns the same error, except for errors of addresses and workspace */
    if (b.ctx) needles[0] = "gmm_linear_query";
    t_before(1, violations[arg / 4].name, __FILE__, __LINE__);
    got = gmm_linear_query(b.ctx, (gmm_op)(GMM_OP_LINEAR_FWD + b.op), b.linear, &info);
    if (b.query) {
        t_refused(b.want, got, gmm_last_error(b.ctx), violations[arg / 4].name, __FILE__, __LINE__, needles);
        T_CHECK(info.workspace_bytes == 0 && info.engine == GMM_ENGINE_AUTO, "the refused query filled info");
    } else T_CHECK(got == GMM_OK, "query: %s: %s", gmm_status_name(got), gmm_last_error(b.ctx));
}

/* The unchanged call is valid, also with a workspace of exactly the queried size. */
static void valid(int arg) {
    bad_call b;
    prepare(&b, arg);
    T_OK(t_linear_functions[arg](b.ctx, b.linear, b.workspace, b.bytes, b.stream));
    lin_check(&b.r);
}

/* Engines are deterministic also where they need not be: the same bits, whatever the option says. */
static void nondeterminism(int op) {
    bad_call first, b;
    t_reseed(1);
    prepare(&first, op);
    T_OK(t_linear_functions[op](first.ctx, first.linear, first.workspace, first.bytes, first.stream));
    for (int i = 0; i < 4; i++) {
        t_reseed(1);
        prepare(&b, op);
        b.r.options.allow_nondeterminism = 1;
        b.d->options = &b.r.options;
        T_OK(t_linear_functions[op](b.ctx, b.linear, b.workspace, b.bytes, b.stream));
        lin_check(&b.r);
        t_same("with and without nondeterminism", t_mat_bits(&b.r.out), t_mat_bits(&first.r.out),
               (size_t)(first.r.out.count * first.r.out.rows * first.r.out.cols * ref_bytes(first.r.out.dtype)));
    }
}

static void query_errors(int arg) {
    bad_call b;
    gmm_info info = GMM_ZERO;
    char size[32];
    (void)arg;
    prepare(&b, 0);
    T_REFUSED(GMM_E_NULL, gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, b.d, NULL),
              "gmm_linear_query: info is NULL", NULL);
    T_REFUSED(GMM_E_ARG, gmm_linear_query(T.ctx, GMM_OP_ACT_FWD, b.d, &info), "gmm_linear_query", ": op:", NULL);
    T_REFUSED(GMM_E_ARG, gmm_linear_query(T.ctx, (gmm_op)-1, b.d, &info), "gmm_linear_query", ": op: -1", NULL);
    T_REFUSED(GMM_E_ARG, gmm_linear_query(T.ctx, GMM_OP_COUNT, b.d, &info), "gmm_linear_query", ": op:", NULL);
    info.struct_size = (uint32_t)sizeof info + 16;
    (void)snprintf(size, sizeof size, "%u", (unsigned)info.struct_size);
    T_REFUSED(GMM_E_VERSION, gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, b.d, &info), "gmm_linear_query", "info",
              size, NULL);
    /* operands that the operation does not use are not read */
    info.struct_size = 0;
    b.d->dy = b.d->dx = (const gmm_mat *)1;
    b.d->dw = b.d->db = (const gmm_grad *)1;
    T_OK(gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, b.d, &info));
    T_OK(gmm_linear_fwd(T.ctx, b.d, b.workspace, b.bytes, T.stream));
    lin_check(&b.r);
}

static void offsets_errors(int arg) {
    static const int32_t sizes[] = {3, 4}, negative[] = {3, -44};
    gmm_groups groups = GMM_ZERO;
    int64_t *out = (int64_t *)t_alloc(3 * sizeof *out);
    (void)arg;
    groups.count = 2;
    groups.capacity = 7;
    groups.dtype = GMM_I32;
    groups.splits = t_in(sizes, sizeof sizes);
    T_OK(gmm_offsets(T.ctx, &groups, out, T.stream));
    T_REFUSED_TEXT(GMM_E_NULL, gmm_offsets(NULL, &groups, out, T.stream), "", NULL);
    T_REFUSED(GMM_E_NULL, gmm_offsets(T.ctx, NULL, out, T.stream), "gmm_offsets: groups is NULL", NULL);
    T_REFUSED(GMM_E_NULL, gmm_offsets(T.ctx, &groups, NULL, T.stream), "gmm_offsets", "offsets", NULL);
    T_REFUSED(GMM_E_ALIGN, gmm_offsets(T.ctx, &groups, (int64_t *)odd(out), T.stream), "gmm_offsets", "offsets", NULL);
    groups.count = 0;
    T_REFUSED(GMM_E_ARG, gmm_offsets(T.ctx, &groups, out, T.stream), "gmm_offsets: groups.count: 0", "T=7", NULL);
    groups.count = 2;
    groups.dtype = GMM_F16;
    T_REFUSED(GMM_E_DTYPE, gmm_offsets(T.ctx, &groups, out, T.stream), "gmm_offsets", "f16", NULL);
    groups.dtype = GMM_I32;
    groups.on_host = 1;
    groups.splits = negative;
    T_REFUSED(GMM_E_SPLIT, gmm_offsets(T.ctx, &groups, out, T.stream), "gmm_offsets", "-44", "group 1", NULL);
    groups.splits = sizes;
    groups.capacity = 6;
    T_REFUSED(GMM_E_SPLIT, gmm_offsets(T.ctx, &groups, out, T.stream), "gmm_offsets", "4", "6", NULL);
    groups.capacity = 7;
    groups.struct_size = 4096;
    T_REFUSED(GMM_E_VERSION, gmm_offsets(T.ctx, &groups, out, T.stream), "gmm_offsets", "4096", NULL);
}

#ifdef HAVE_CUDA
/* A CUDA call that fails is GMM_E_CUDA with CUDA's words, and is not found again by the calls behind it. CUDA limits
   pitches to 2^31 - 1. */
static void cuda_errors(int arg) {
    unsigned char *a = (unsigned char *)t_alloc(64), *b = (unsigned char *)t_alloc(64);
    gmm_runtime rt = GMM_ZERO;
    (void)arg;
    if (device_emulated()) t_skip("the emulator takes every pitch");
    T_OK(gmm_runtime_of(T.ctx, &rt));
    T_REFUSED(GMM_E_CUDA, rt.copy2d(rt.self, a, (size_t)1 << 40, b, 8, 8, 2, T.stream), "gmm_runtime.copy2d", "invalid",
              NULL);
    T_OK(rt.copy2d(rt.self, a, 16, b, 8, 8, 2, T.stream));
    valid(0);
}
#endif

/* Status codes that no linear call returns. GMM_E_BUILD, GMM_E_DEVICE and GMM_E_MEMORY are in test_context.c; CAPTURE
   and COMM need a GPU or a communicator. */
static void other_codes(int arg) {
    gmm_pad_in in = GMM_ZERO;
    gmm_wgrad_in decide = GMM_ZERO;
    gmm_wgrad_out out = GMM_ZERO;
    gmm_wgrad_entry *entry = (gmm_wgrad_entry *)t_host(sizeof *entry);
    gmm_wgrad_queue queue = gmm_wgrad_queue_over(entry, 1);
    gmm_error error = GMM_ZERO;
    int32_t align = 77;
    (void)arg;
    in.recipe = (gmm_recipe_kind)91;
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_pad_decide(&in, &align, &error), error.text, "gmm_pad_decide: in.recipe: 91",
                   NULL);
    T_CHECK(align == 77 && error.status == GMM_E_CONFIG, "align %d", (int)align);
    decide.delay = 5;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_wgrad_decide(&decide, &out, &error), error.text, "gmm_wgrad_decide", "5", NULL);
    T_REFUSED(GMM_E_STATE, gmm_mlp_wgrad(T.ctx, &queue, NULL, 0, T.stream), "gmm_mlp_wgrad", "queue", NULL);
}

void tests_errors(void) {
    for (int k = 0; k < 4; k++) t_add(valid, k, "errors %s exact workspace, canaries", functions[k]);
    for (int i = 0; i < T_COUNT(violations); i++)
        for (int k = 0; k < 4; k++)
            if (violations[i].ops >> k & 1)
                t_add(violate, i * 4 + k, "errors %s %s", functions[k], violations[i].name);
    for (int k = 0; k < 4; k++) t_add(nondeterminism, k, "errors %s may be nondeterministic", functions[k]);
    t_add(query_errors, 0, "errors gmm_linear_query");
    t_add(offsets_errors, 0, "errors gmm_offsets");
    t_add(other_codes, 0, "errors other status codes");
#ifdef HAVE_CUDA
    t_add_gpu(cuda_errors, 0, "errors of CUDA");
#endif
}
