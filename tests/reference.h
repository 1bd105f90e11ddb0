/* reference.h - what the tests compare with: fp64 arithmetic and exact codecs, written apart from the library. */
#ifndef GMM_TESTS_REFERENCE_H
#define GMM_TESTS_REFERENCE_H

#include "gmm.h"

/* Bytes of one element, for dtypes of at least 8 bits. */
int64_t ref_bytes(gmm_dtype dtype);
/* "fp8 delayed", ...: for names of cases. */
const char *ref_recipe_name(gmm_recipe_kind kind);

/* Element i of an array of F32, F16, BF16, and back (rounded once, to nearest even). */
double ref_load(gmm_dtype dtype, const void *base, int64_t i);
void ref_store(gmm_dtype dtype, void *base, int64_t i, double v);
double ref_round(gmm_dtype dtype, double v); /* to the nearest value of dtype */

/* Bits of v rounded to a binary format of `exponent` and `mantissa` bits with IEEE infinities, NaN as 0x7FFF... of the
   format's width. Built from exact
   quotients in units of the last place, for formats of at most 32 bits. */
uint32_t ref_encode(double v, int exponent, int mantissa);
double ref_decode(uint32_t bits, int exponent, int mantissa);

/* Half a unit in the last place of dtype relative to a value: 2^-24, 2^-11, 2^-8; and its smallest subnormal. */
double ref_roundoff(gmm_dtype dtype);
double ref_tiny(gmm_dtype dtype);

/* The largest error that fp32 accumulation of `terms` products and one store to dtype can make, in any order of
   accumulation. Each product and each addition rounds by a factor (1 + d), |d| <= u = 2^-24; a term passes through at
   most terms + 8 roundings (8 covers alpha, bias, row scale and beta), so the error of the sum is at most
   (terms + 8) u / (1 - (terms + 8) u) times `magnitude`, the sum of the terms' absolute values. The store then rounds a
   value of at most |exact| + that error. */
double ref_bound(gmm_dtype dtype, int64_t terms, double magnitude, double exact);

/* One element of a grouped linear operation in fp64, and the magnitude for ref_bound. Arrays are dense; those that are
   NULL are absent. `start` holds the destination's values before the call: it counts where beta is not 0.
       fwd    (row r, col n)  alpha[g] sum_k x[r][k] w[g][n][k] + bias[g][n] s[r] + beta start[r][n]
       dgrad  (row r, col k)  alpha[g] sum_n dy[r][n] w[g][n][k] + beta start[r][k]
       wgrad  (row n, col k)  alpha[g] sum_r dy[r][n] x[r][k] + beta start[g][n][k]
       bgrad  (row 0, col n)  sum_r s[r] dy[r][n] + beta start[g][n] */
typedef struct ref_linear {
    int64_t in, out;
    const int64_t *offsets; /* [G + 1] */
    const double *x, *w, *dy, *bias, *scale, *alpha, *start;
} ref_linear;
double ref_linear_at(const ref_linear *l, gmm_op op, int64_t g, int64_t row, int64_t col, double beta,
                     double *magnitude);
/* sum_n dy[r][n] bias[g][n] */
double ref_bias_scale_at(const ref_linear *l, int64_t g, int64_t row, double *magnitude);
/* Products that one element sums up. */
int64_t ref_linear_terms(const ref_linear *l, gmm_op op, int64_t g);

/* One activation and its derivatives, from the definitions with libm. The sizes are the sums of the absolute values of
   the terms, to which errors are relative. */
typedef struct ref_point { double y, da, db, y_size, da_size, db_size; } ref_point;
ref_point ref_act(const gmm_act *act, double a, double b);

/* What the tests know of an activation; every case about activations iterates over these rows. `gate` returns F(a) and
   stores the terms of its derivative in *first and *second. */
typedef struct ref_act_row {
    gmm_act_kind kind;
    int value; /* value of the enumerator, which is part of the ABI and of checkpoints */
    const char *name;
    double (*gate)(const gmm_act *act, double a, double *first, double *second);
    int gated, alpha, betas; /* whether it is gated, takes alpha, takes beta1 and beta2 */
} ref_act_row;
extern const ref_act_row ref_acts[];
extern const int ref_act_count;

#endif
