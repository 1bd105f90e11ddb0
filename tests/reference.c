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

const char *ref_recipe_name(gmm_recipe_kind kind) {
    static const char *const names[] = {
        [GMM_RECIPE_NONE] = "none", [GMM_RECIPE_FP8_DELAYED] = "fp8 delayed", [GMM_RECIPE_FP8_CURRENT] = "fp8 current",
        [GMM_RECIPE_FP8_BLOCK] = "fp8 block", [GMM_RECIPE_MXFP8] = "mxfp8", [GMM_RECIPE_NVFP4] = "nvfp4"};
    return names[kind];
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
    if (a < ref_pow2(-300)) return sign; /* far below half of the smallest subnormal of every format */
    (void)frexp(a, &e);
    e -= 1; /* a = 1.xxx * 2^e */
    if (e < 1 - bias) e = 1 - bias;
    steps = a * ref_pow2(mantissa - e);      /* in units in the last place; exact */
    steps = (steps + 0x1p52) - 0x1p52;       /* rounded to an integer, ties to even */
    /* a carry into the next power of two increments the exponent field, as does the first normal value */
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
    const float single = (float)v; /* the conversion rounds to nearest even */
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

double ref_bias_scale_at(const ref_linear *l, int64_t g, int64_t row, double *magnitude) {
    double sum = 0.0, size = 0.0;
    for (int64_t n = 0; n < l->out; n++) {
        const double term = l->dy[row * l->out + n] * l->bias[g * l->out + n];
        sum += term;
        size += fabs(term);
    }
    *magnitude = size;
    return sum;
}

/* ---------------------------------------------------------------------------------------------- Activations --- */

static double sigmoid(double x) { return x < 0.0 ? exp(x) / (1.0 + exp(x)) : 1.0 / (1.0 + exp(-x)); }
static double or_default(float v, double value) { return v == 0.0f ? value : (double)v; }

static double ref_none(const gmm_act *act, double a, double *first, double *second) {
    (void)act;
    *first = 1.0;
    *second = 0.0;
    return a;
}
static double ref_relu(const gmm_act *act, double a, double *first, double *second) {
    (void)act;
    *first = a <= 0.0 ? 0.0 : 1.0;
    *second = 0.0;
    return a < 0.0 ? 0.0 : a;
}
static double ref_relu2(const gmm_act *act, double a, double *first, double *second) {
    (void)act;
    *first = a < 0.0 ? 0.0 : 2.0 * a;
    *second = 0.0;
    return a < 0.0 ? 0.0 : a * a;
}
static double ref_gelu_tanh(const gmm_act *act, double a, double *first, double *second) {
    const double u = or_default(act->alpha, 1.0) * a, share = sqrt(2.0 / acos(-1.0));
    const double t = share * (u + 0.044715 * u * u * u);
    *first = sigmoid(2.0 * t); /* (1 + tanh(t)) / 2 without its cancellation */
    *second = 0.5 * u / (cosh(t) * cosh(t)) * share * (1.0 + 3.0 * 0.044715 * u * u);
    if (fabs(t) > 350.0) *second = 0.0; /* cosh would overflow */
    return a * *first;
}
static double ref_gelu_erf(const gmm_act *act, double a, double *first, double *second) {
    const double u = or_default(act->alpha, 1.0) * a;
    *first = 0.5 * erfc(-u / sqrt(2.0));
    *second = fabs(u) > 1e3 ? 0.0 : u * exp(-0.5 * u * u) / sqrt(2.0 * acos(-1.0));
    return a * *first;
}
static double ref_silu_by(double slope, double a, double *first, double *second) {
    *first = sigmoid(slope * a);
    *second = slope * a * *first * sigmoid(-slope * a);
    return a * *first;
}
static double ref_silu(const gmm_act *act, double a, double *first, double *second) {
    return ref_silu_by(or_default(act->alpha, 1.0), a, first, second);
}
static double ref_qgelu(const gmm_act *act, double a, double *first, double *second) {
    return ref_silu_by(1.702 * or_default(act->alpha, 1.0), a, first, second);
}
static double ref_sigmoid_gate(const gmm_act *act, double a, double *first, double *second) {
    const double alpha = or_default(act->alpha, 1.0), f = sigmoid(alpha * a);
    *first = alpha * f * sigmoid(-alpha * a);
    *second = 0.0;
    return f;
}
static double ref_situ(const gmm_act *act, double a, double *first, double *second) {
    const double alpha = or_default(act->alpha, 1.0), beta = or_default(act->beta1, 4.0);
    const double s = sigmoid(alpha * a), t = beta * tanh(a / beta);
    *first = s / (cosh(a / beta) * cosh(a / beta));
    *second = alpha * t * s * sigmoid(-alpha * a);
    return t * s;
}

const ref_act_row ref_acts[] = {
    { GMM_ACT_NONE, 0, "none", ref_none, 0, 0, 0 },
    { GMM_ACT_RELU, 1, "relu", ref_relu, 0, 0, 0 },
    { GMM_ACT_RELU2, 2, "relu2", ref_relu2, 0, 0, 0 },
    { GMM_ACT_GELU, 3, "gelu", ref_gelu_tanh, 0, 1, 0 },
    { GMM_ACT_QGELU, 4, "qgelu", ref_qgelu, 0, 1, 0 },
    { GMM_ACT_SILU, 5, "silu", ref_silu, 0, 1, 0 },
    { GMM_ACT_GLU, 6, "glu", ref_sigmoid_gate, 1, 1, 0 },
    { GMM_ACT_REGLU, 7, "reglu", ref_relu, 1, 0, 0 },
    { GMM_ACT_RELU2_GLU, 8, "relu2_glu", ref_relu2, 1, 0, 0 },
    { GMM_ACT_GEGLU, 9, "geglu", ref_gelu_tanh, 1, 1, 0 },
    { GMM_ACT_QGEGLU, 10, "qgeglu", ref_qgelu, 1, 1, 0 },
    { GMM_ACT_SWIGLU, 11, "swiglu", ref_silu, 1, 1, 0 },
    { GMM_ACT_SITUGLU, 12, "situglu", ref_situ, 1, 1, 1 },
    { GMM_ACT_GELU_ERF, 13, "gelu_erf", ref_gelu_erf, 0, 1, 0 },
    { GMM_ACT_GEGLU_ERF, 14, "geglu_erf", ref_gelu_erf, 1, 1, 0 },
};
const int ref_act_count = (int)(sizeof ref_acts / sizeof ref_acts[0]);

ref_point ref_act(const gmm_act *act, double a, double b) {
    const double limit = act->limit > 0.0f ? (double)act->limit : INFINITY, beta = or_default(act->beta2, 25.0);
    const double ga = a > limit ? limit : a, gb = b > limit ? limit : b < -limit ? -limit : b;
    const ref_act_row *row = ref_acts;
    double first, second, f, slope, size, linear = gb, linear_slope = 1.0, linear_size;
    ref_point p;
    while (row->kind != act->kind) row++;
    f = row->gate(act, ga, &first, &second);
    slope = first + second;
    size = fabs(first) + fabs(second);
    if (!row->gated) linear = 1.0;
    if (row->betas) {
        linear = beta * tanh(gb / beta);
        linear_slope = 1.0 / (cosh(gb / beta) * cosh(gb / beta));
    }
    linear_size = fabs(linear) + fabs((double)act->offset);
    linear += (double)act->offset;
    p.y = f * linear;
    p.y_size = fabs(f) * linear_size;
    p.da = a > limit ? 0.0 : slope * linear;
    p.da_size = a > limit ? 0.0 : size * linear_size;
    p.db = !row->gated || b > limit || b < -limit ? 0.0 : f * linear_slope;
    p.db_size = fabs(p.db);
    return p;
}
