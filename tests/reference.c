/* reference.c - see reference.h. Uses no arithmetic of the library. */
#include "reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t ref_bytes(gmm_dtype dtype) {
    switch (dtype) {
    case GMM_F32: case GMM_I32: return 4;
    case GMM_F16: case GMM_BF16: return 2;
    case GMM_I64: return 8;
    default: return 1;
    }
}

static void ref_format(gmm_dtype dtype, int *exponent, int *mantissa) {
    *exponent = dtype == GMM_F16 ? 5 : 8;
    *mantissa = dtype == GMM_F16 ? 10 : dtype == GMM_BF16 ? 7 : 23;
}

/* 2^e for -1022 <= e <= 1023 */
static double ref_pow2(int e) {
    const uint64_t bits = (uint64_t)(e + 1023) << 52;
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

uint32_t ref_encode(double v, int exponent, int mantissa) {
    const int bias = (1 << (exponent - 1)) - 1;
    const uint32_t infinity = (uint32_t)((1 << exponent) - 1) << mantissa;
    const uint32_t sign = signbit(v) ? 1u << (exponent + mantissa) : 0u;
    const double a = fabs(v);
    double steps;
    int e;
    if (isnan(v)) return (1u << (exponent + mantissa)) - 1u;
    if (a >= ref_pow2(bias + 1)) return sign | infinity;
    if (a < ref_pow2(-300)) return sign; /* far below half of any smallest subnormal here */
    (void)frexp(a, &e);
    e -= 1; /* a = 1.xxx * 2^e */
    if (e < 1 - bias) e = 1 - bias;
    steps = a * ref_pow2(mantissa - e);      /* in units of the last place: exact */
    steps = (steps + 0x1p52) - 0x1p52;       /* to an integer, ties to even */
    /* a carry into the next power of two moves on to the next exponent by itself, as does the first normal value */
    steps += (double)(e + bias - 1) * ref_pow2(mantissa);
    return sign | (steps >= (double)infinity ? infinity : (uint32_t)steps);
}

double ref_decode(uint32_t bits, int exponent, int mantissa) {
    const int bias = (1 << (exponent - 1)) - 1;
    const uint32_t m = bits & ((1u << mantissa) - 1u);
    const int e = (int)(bits >> mantissa) & ((1 << exponent) - 1);
    const double sign = bits >> (exponent + mantissa) & 1u ? -1.0 : 1.0;
    if (e == (1 << exponent) - 1) return m ? (double)NAN : sign * (double)INFINITY;
    if (e == 0) return sign * (double)m * ref_pow2(1 - bias - mantissa);
    return sign * (double)(m + (1u << mantissa)) * ref_pow2(e - bias - mantissa);
}

double ref_load(gmm_dtype dtype, const void *base, int64_t i) {
    const unsigned char *at = (const unsigned char *)base + i * ref_bytes(dtype);
    int exponent, mantissa;
    uint16_t half;
    float single;
    if (dtype == GMM_F32) {
        memcpy(&single, at, sizeof single);
        return (double)single;
    }
    memcpy(&half, at, sizeof half);
    ref_format(dtype, &exponent, &mantissa);
    return ref_decode(half, exponent, mantissa);
}

void ref_store(gmm_dtype dtype, void *base, int64_t i, double v) {
    unsigned char *at = (unsigned char *)base + i * ref_bytes(dtype);
    int exponent, mantissa;
    uint16_t half;
    const float single = (float)v; /* the processor rounds to nearest even */
    if (dtype == GMM_F32) {
        memcpy(at, &single, sizeof single);
        return;
    }
    ref_format(dtype, &exponent, &mantissa);
    half = (uint16_t)ref_encode(v, exponent, mantissa);
    memcpy(at, &half, sizeof half);
}

double ref_round(gmm_dtype dtype, double v) {
    int exponent, mantissa;
    if (dtype == GMM_F32) return (double)(float)v;
    ref_format(dtype, &exponent, &mantissa);
    return ref_decode(ref_encode(v, exponent, mantissa), exponent, mantissa);
}

double ref_roundoff(gmm_dtype dtype) { return dtype == GMM_F32 ? 0x1p-24 : dtype == GMM_F16 ? 0x1p-11 : 0x1p-8; }
double ref_tiny(gmm_dtype dtype) { return dtype == GMM_F32 ? 0x1p-149 : dtype == GMM_F16 ? 0x1p-24 : 0x1p-133; }

double ref_bound(gmm_dtype dtype, int64_t terms, double magnitude, double exact) {
    const double u = (double)(terms + 8) * 0x1p-24;
    const double sum = u / (1.0 - u) * magnitude;
    return sum + ref_roundoff(dtype) * (fabs(exact) + sum) + ref_tiny(dtype);
}

int64_t ref_linear_terms(const ref_linear *l, gmm_op op, int64_t g) {
    if (op == GMM_OP_LINEAR_FWD) return l->in;
    if (op == GMM_OP_LINEAR_DGRAD) return l->out;
    return l->offsets[g + 1] - l->offsets[g];
}

double ref_linear_at(const ref_linear *l, gmm_op op, int64_t g, int64_t row, int64_t col, double beta,
                     double *magnitude) {
    const int64_t terms = ref_linear_terms(l, op, g), first = l->offsets[g], K = l->in, N = l->out;
    const double alpha = op != GMM_OP_LINEAR_BGRAD && l->alpha ? l->alpha[g] : 1.0;
    double sum = 0.0, size = 0.0, bias = 0.0, start = 0.0;
    int64_t index;
    for (int64_t i = 0; i < terms; i++) {
        double term;
        switch (op) {
        case GMM_OP_LINEAR_FWD: term = l->x[row * K + i] * l->w[(g * N + col) * K + i]; break;
        case GMM_OP_LINEAR_DGRAD: term = l->dy[row * N + i] * l->w[(g * N + i) * K + col]; break;
        case GMM_OP_LINEAR_WGRAD: term = l->dy[(first + i) * N + row] * l->x[(first + i) * K + col]; break;
        default: term = l->dy[(first + i) * N + col] * (l->scale ? l->scale[first + i] : 1.0); break;
        }
        sum += term;
        size += fabs(term);
    }
    if (op == GMM_OP_LINEAR_FWD && l->bias) bias = l->bias[g * N + col] * (l->scale ? l->scale[row] : 1.0);
    switch (op) {
    case GMM_OP_LINEAR_FWD: index = row * N + col; break;
    case GMM_OP_LINEAR_DGRAD: index = row * K + col; break;
    case GMM_OP_LINEAR_WGRAD: index = (g * N + row) * K + col; break;
    default: index = g * N + col; break;
    }
    if (beta != 0.0) start = beta * l->start[index];
    *magnitude = fabs(alpha) * size + fabs(bias) + fabs(start);
    return alpha * sum + bias + start;
}

double ref_row_scale_at(const ref_linear *l, int64_t g, int64_t row, double *magnitude) {
    double sum = 0.0, size = 0.0;
    for (int64_t n = 0; n < l->out; n++) {
        const double term = l->dy[row * l->out + n] * l->bias[g * l->out + n];
        sum += term;
        size += fabs(term);
    }
    *magnitude = size;
    return sum;
}
