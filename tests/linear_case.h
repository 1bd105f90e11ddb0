/* linear_case.h - builds, runs and checks one grouped linear call from a short description; for test_linear.c,
   test_groups.c and test_context.c. */
#ifndef GMM_TESTS_LINEAR_CASE_H
#define GMM_TESTS_LINEAR_CASE_H

#include "test.h"

typedef enum lin_split { LIN_I32, LIN_I64, LIN_OFFSETS32, LIN_OFFSETS64 } lin_split;

/* Rows of x and dy that are gathered: every row once, in order or not; several rows from one; rows of zeros among
   them, by negative entries; and by entries past the matrix, which set a fault bit. */
typedef enum lin_index { LIN_NO_INDEX, LIN_IDENTITY, LIN_PERMUTED, LIN_REPEATED, LIN_NEGATIVE, LIN_PAST } lin_index;

typedef struct lin_spec {
    gmm_op op;
    gmm_dtype in, out;       /* dtype of the two operands; of the result (y, dx, dw or db). 0 = F32 */
    gmm_dtype bias;          /* GMM_NONE = no bias */
    int32_t groups;
    int64_t K, N;
    const int64_t *sizes;    /* [groups] */
    int64_t extra;           /* capacity beyond the sum of the sizes */
    lin_split split;
    int on_host;
    int64_t pad, gap;        /* of every matrix */
    t_form w, grad, bias_form;
    int alpha;               /* 0 none, 1 one value, 2 per group */
    int scale;               /* bias_scale, with zeros and negatives */
    int prob;                /* the same for prob */
    int add;                 /* y_add */
    int main_grad, overwrite;
    int beta;                /* per group */
    int frozen;              /* every third group is frozen */
    int dscale;              /* bgrad: 1 store d_bias_scale, 2 add to it */
    int no_db;
    gmm_tail tail;
    int32_t row_align;
    int64_t hint;
    lin_index index;
    int32_t index_div;
    int plain;               /* with an index in wgrad: 1 x has none, 2 dy has none */
    t_fill fill;
} lin_spec;

/* A built call. `out` is y, dx, dw or db; rows of x, dy, bias_scale and prob past the sum are NaN; destinations that
   are not read before they are written are poison. */
typedef struct lin_run {
    lin_spec spec;
    int64_t live, capacity;
    int64_t *offsets;
    gmm_groups groups;
    gmm_options options;
    t_mat x, w, dy, bias, out;
    const double *x_rows, *dy_rows; /* values of the product's rows: those of x and dy, or what is gathered from them */
    uint32_t faults;                /* that are expected */
    double *scale, *prob, *alpha, *beta; /* NULL = absent; alpha per group */
    double *dscale_start;
    unsigned char *frozen;
    uint32_t *fault;                /* device word, starts 0 */
    gmm_grad grad;
    gmm_linear d;
    void *before;                   /* bits of `out` before the call */
} lin_run;

void lin_build(lin_run *r, const lin_spec *spec);
/* Compares all outputs with the reference: exact for T_INTS, within ref_bound for T_REALS. */
#define lin_check(...) T_CALL(lin_check, __VA_ARGS__)
void (lin_check)(const lin_run *r);
/* Build, call on T.ctx, check. */
#define lin_test(...) T_CALL(lin_test, __VA_ARGS__)
void (lin_test)(const lin_spec *spec);
/* Dense bits of group g's part of the output. */
void *lin_group_bits(const lin_run *r, int64_t g, size_t *bytes);
/* Calls each group alone (count 1, capacity its rows) and requires the same bits. */
#define lin_alone(...) T_CALL(lin_alone, __VA_ARGS__)
/* Build and call with gathered rows, and again on the same engine with operands that were gathered by the test: the
   same bits. Both are checked. */
#define lin_by_hand(...) T_CALL(lin_by_hand, __VA_ARGS__)
void (lin_by_hand)(const lin_spec *spec);
void (lin_alone)(const lin_run *r);
gmm_dtype lin_dtype(int i); /* 0 f32, 1 f16, 2 bf16 */

#endif
