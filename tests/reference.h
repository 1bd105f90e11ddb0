/* reference.h - what the tests compare with: fp64 arithmetic and exact codecs, written apart from the library. */
#ifndef GMM_TESTS_REFERENCE_H
#define GMM_TESTS_REFERENCE_H

#include "gmm.h"

/* Bytes of one element, for dtypes of at least 8 bits. */
int64_t ref_bytes(gmm_dtype dtype);
/* "fp8 delayed", ...: for names of cases. */
const char *ref_recipe_name(gmm_recipe_kind kind);

/* The recipes that tests of MLPs iterate over: those of every kind, and settings that change what an MLP does. */
enum {
    REF_FP8_DELAYED, REF_FP8_CURRENT, REF_FP8_BLOCK, REF_MXFP8, REF_NVFP4, REF_MXFP4_BF16, REF_NVFP4_ROW_AMAX,
    REF_NVFP4_4OVER6, REF_NVFP4_4OVER6_256, REF_RECIPES
};
typedef struct ref_recipe { const char *name; gmm_recipe recipe; } ref_recipe;
ref_recipe ref_recipe_of(int i);

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
    const double *x, *w, *dy, *bias, *scale, *prob, *alpha, *start;
} ref_linear;
double ref_linear_at(const ref_linear *l, gmm_op op, int64_t g, int64_t row, int64_t col, double beta,
                     double *magnitude);
/* sum_n dy[r][n] bias[g][n] */
double ref_bias_scale_at(const ref_linear *l, int64_t g, int64_t row, double *magnitude);
/* Products that one element sums up. */
int64_t ref_linear_terms(const ref_linear *l, gmm_op op, int64_t g);

/* Codes of E4M3, E5M2 and E2M1: the value of a code; the nearest code, ties to the even one, saturating at the largest
   finite value, where NaN is 0x7F (E2M1: +6). */
double ref_decode_small(gmm_dtype dtype, uint8_t code);
uint8_t ref_encode_small(gmm_dtype dtype, double v);
/* Stores a code as element i. E2M1: element 2i in the low half of byte i. */
void ref_put_code(gmm_dtype dtype, uint8_t *data, int64_t i, uint8_t code);

/* 16 values, `step` apart, transformed in place by the random Hadamard matrix: y = 0.25 H16 (x .* s), where bit i of
   `signs` makes s_i = -1. Sums in fp32 by stages of strides 1, 2, 4, 8, results rounded to BF16. */
void ref_hadamard(float *x, int64_t step, unsigned signs);

/* One matrix or group in a format, as lines along its blocks: values in, codes and scales of every block out. All steps
   are the formulas of the formats, each a single fp32 operation. The caller gives the arrays; their sizes stand beside
   them, with ref_line_blocks for the blocks of a line. */
typedef struct ref_copy {
    const gmm_format *f;
    gmm_dtype source;         /* dtype that the values come from */
    gmm_direction direction;
    int64_t lines, along;     /* extents of the values (along: padded in columnwise copies of groups) */
    int64_t live;             /* rows of the group or matrix */
    float *x;                 /* [lines][along] */
    float quant_scale;        /* delayed */
    uint64_t seed, offset;    /* stochastic */
    int64_t group;
    uint8_t *code;            /* out, [lines][along] */
    uint32_t *scale;          /* out, [lines][blocks of a line]: bits of an fp32, or a scale byte */
    float *line_amax;         /* out, [lines] */
    int64_t per_line;         /* out: blocks of a line */
    float amax;               /* out: of the whole matrix or group */
} ref_copy;
int64_t ref_line_blocks(const gmm_format *f, int64_t along);
void ref_quantize(ref_copy *c);
/* The value of element i of line l, which products multiply; and what dequantization gives in fp32. */
double ref_value(const ref_copy *c, int64_t l, int64_t i);
float ref_dequantized(const ref_copy *c, int64_t l, int64_t i);

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
