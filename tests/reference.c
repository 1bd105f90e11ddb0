/* reference.c - see reference.h. Uses no arithmetic of the library. */
#include "reference.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t ref_bytes(gmm_dtype dtype) {
    switch (dtype) {
    case GMM_F32: case GMM_I32: return 4;
    case GMM_F16: case GMM_BF16: return 2;
    case GMM_I64: case GMM_F64: return 8;
    default: return 1;
    }
}

const char *ref_recipe_name(gmm_recipe_kind kind) {
    static const char *const names[] = {
        [GMM_RECIPE_NONE] = "none", [GMM_RECIPE_FP8_DELAYED] = "fp8 delayed", [GMM_RECIPE_FP8_CURRENT] = "fp8 current",
        [GMM_RECIPE_FP8_BLOCK] = "fp8 block", [GMM_RECIPE_MXFP8] = "mxfp8", [GMM_RECIPE_NVFP4] = "nvfp4"};
    return names[kind];
}

ref_recipe ref_recipe_of(int i) {
    static const struct { const char *name; gmm_recipe_kind kind; } rows[REF_RECIPES] = {
        [REF_FP8_DELAYED] = { "fp8 delayed", GMM_RECIPE_FP8_DELAYED },
        [REF_FP8_CURRENT] = { "fp8 current", GMM_RECIPE_FP8_CURRENT },
        [REF_FP8_BLOCK] = { "fp8 block", GMM_RECIPE_FP8_BLOCK },
        [REF_MXFP8] = { "mxfp8", GMM_RECIPE_MXFP8 },
        [REF_NVFP4] = { "nvfp4", GMM_RECIPE_NVFP4 },
        [REF_MXFP4_BF16] = { "mxfp4 weights with bf16", GMM_RECIPE_MXFP8 },
        [REF_NVFP4_ROW_AMAX] = { "nvfp4 row amax", GMM_RECIPE_NVFP4 },
        [REF_NVFP4_4OVER6] = { "nvfp4 four over six", GMM_RECIPE_NVFP4 },
        [REF_NVFP4_4OVER6_256] = { "nvfp4 four over six up to 256", GMM_RECIPE_NVFP4 },
    };
    ref_recipe r;
    r.name = rows[i].name;
    r.recipe = gmm_recipe_of(rows[i].kind);
    if (i == REF_MXFP4_BF16) {
        r.recipe.weight.dtype = GMM_E2M1;
        memset(&r.recipe.input, 0, sizeof r.recipe.input);
        memset(&r.recipe.grad, 0, sizeof r.recipe.grad);
    }
    if (i >= REF_NVFP4_ROW_AMAX) r.recipe.input.hadamard = r.recipe.grad.hadamard = 0;
    if (i == REF_NVFP4_ROW_AMAX) r.recipe.input.row_amax = 1;
    if (i == REF_NVFP4_4OVER6) r.recipe.input.four_over_six = 1; /* by absolute error */
    if (i == REF_NVFP4_4OVER6_256) {
        r.recipe.input.four_over_six = r.recipe.weight.four_over_six = 2; /* by squared error */
        r.recipe.input.e4m3_256 = r.recipe.weight.e4m3_256 = 1;
    }
    return r;
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
    uint64_t bits;
    double steps;
    int e;
    if (isnan(v)) return (1u << (exponent + mantissa)) - 1u;
    if (a >= ref_pow2(bias + 1)) return sign | infinity;
    if (a < ref_pow2(-300)) return sign; /* far below half of the smallest subnormal of every format */
    memcpy(&bits, &a, sizeof bits);
    e = (int)(bits >> 52) - 1023; /* a = 1.xxx * 2^e */
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
    const double prob = (op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_DGRAD) && l->prob ? l->prob[row] : 1.0;
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
    *magnitude = fabs(prob) * (fabs(alpha) * size + fabs(bias)) + fabs(start);
    return prob * (alpha * sum + bias) + start;
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

/* --------------------------------------------------------------------------------------------- Quantization --- */

static const struct small { int mantissa, bias, bits; uint8_t largest, nan; } smalls[3] = {
    { 3, 7, 7, 0x7E, 0x7F }, { 2, 15, 7, 0x7B, 0x7F }, { 1, 1, 3, 7, 7 }
};
static const struct small *small_of(gmm_dtype dtype) {
    return &smalls[dtype == GMM_E4M3 ? 0 : dtype == GMM_E5M2 ? 1 : 2];
}

double ref_decode_small(gmm_dtype dtype, uint8_t code) {
    const struct small *f = small_of(dtype);
    const int a = code & ((1 << f->bits) - 1), e = a >> f->mantissa, m = a & ((1 << f->mantissa) - 1);
    const double sign = code >> f->bits & 1 ? -1.0 : 1.0;
    if (a > f->largest) return dtype == GMM_E5M2 && m == 0 ? sign * (double)INFINITY : (double)NAN;
    if (e == 0) return sign * (double)m * ref_pow2(1 - f->bias - f->mantissa);
    return sign * (double)(m + (1 << f->mantissa)) * ref_pow2(e - f->bias - f->mantissa);
}

uint8_t ref_encode_small(gmm_dtype dtype, double v) {
    static _Thread_local double value[3][128]; /* of all codes, in ascending order */
    const struct small *f = small_of(dtype);
    double *values = value[f - smalls], middle;
    const double a = fabs(v);
    const uint8_t sign = (uint8_t)(signbit(v) ? 1 << f->bits : 0);
    int low = 0, high = f->largest;
    if (isnan(v)) return f->nan;
    if (values[1] == 0.0)
        for (int i = 0; i <= f->largest; i++) values[i] = ref_decode_small(dtype, (uint8_t)i);
    if (a >= values[high]) return (uint8_t)(sign | high);
    while (high - low > 1) {
        const int at = (low + high) / 2;
        if (values[at] <= a) low = at;
        else high = at;
    }
    middle = (values[low] + values[high]) / 2.0;
    return (uint8_t)(sign | (a > middle || (a == middle && low % 2) ? high : low));
}

void ref_put_code(gmm_dtype dtype, uint8_t *data, int64_t i, uint8_t code) {
    if (dtype != GMM_E2M1) data[i] = code;
    else data[i / 2] = (uint8_t)(i & 1 ? (data[i / 2] & 15) | code << 4 : (data[i / 2] & 0xF0) | code);
}

/* Single fp32 operations. A product of two fp32 values is exact in double, and a sum or quotient that is rounded to
   double first gives the same fp32 value. */
static float times(float a, float b) { return (float)((double)a * (double)b); }
static float over(float a, float b) { return (float)((double)a / (double)b); }
static float plus(float a, float b) { return (float)((double)a + (double)b); }
static float finite(float v) { return v > FLT_MAX ? FLT_MAX : v; }
static uint32_t bits_of(float v) {
    uint32_t u;
    memcpy(&u, &v, sizeof u);
    return u;
}
static float float_of(uint32_t u) {
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}
static float e4m3_of(uint32_t code) { return (float)ref_decode_small(GMM_E4M3, (uint8_t)code); }

void ref_hadamard(float *x, int64_t step, unsigned signs) {
    float y[16];
    for (int i = 0; i < 16; i++) y[i] = signs >> i & 1 ? -x[i * step] : x[i * step];
    for (int stride = 1; stride < 16; stride *= 2)
        for (int i = 0; i < 16; i++) {
            const float a = y[i], b = y[i | stride];
            if (i & stride) continue;
            y[i] = plus(a, b);
            y[i | stride] = plus(a, -b);
        }
    for (int i = 0; i < 16; i++) x[i * step] = (float)ref_round(GMM_BF16, (double)times(y[i], 0.25f));
}

/* The scale of a tensor, row or block of 128 by its amax. */
static float scale_by_amax(const gmm_format *f, gmm_dtype source, float amax) {
    const int block = f->scaling == GMM_SCALING_1X128 || f->scaling == GMM_SCALING_128X128;
    const float largest = !block || source == GMM_F32 ? FLT_MAX : source == GMM_F16 ? 65504.0f : 0x1.FEp127f;
    int exponent;
    float s;
    if (amax < f->eps) amax = f->eps;
    if (amax == 0.0f || isinf(amax)) return 1.0f;
    s = over((float)ref_decode_small(f->dtype, small_of(f->dtype)->largest), amax);
    if (isinf(s)) s = largest;
    if (!f->pow2) return s;
    (void)frexpf(s, &exponent);
    return ldexpf(1.0f, exponent - 1);
}

/* Scale byte of a block of MX32: the exponent of the smallest power of two not below amax / largest. */
static uint32_t mx_scale(gmm_dtype dtype, float amax) {
    const float inverse = (float)(1.0 / ref_decode_small(dtype, small_of(dtype)->largest));
    const float least = times(amax, inverse);
    int exponent;
    if (isinf(amax)) return 254;
    if (least == 0.0f) return 0;
    if (frexpf(least, &exponent) == 0.5f) exponent--;
    return (uint32_t)(exponent < -127 ? 0 : exponent > 127 ? 254 : exponent + 127);
}

/* The two levels of NV16: what a global amax gives, and what a scale byte multiplies elements by. */
static float nv_global(const gmm_format *f, float amax) {
    const float s = finite(over(f->e4m3_256 ? 1536.0f : 2688.0f, amax));
    return amax == 0.0f || s == 0.0f ? 1.0f : s;
}
static float nv_factor(float global, uint32_t scale) {
    return finite(over(1.0f, times(e4m3_of(scale), over(1.0f, global))));
}

/* The scale byte of a block of `tall` lines of n values with the less error of two: by its amax as 6, or as 4. */
static uint32_t four_over_six(const ref_copy *c, float global, float global_amax, const float *x, int64_t tall,
                              int64_t n, float amax) {
    const float base = times(over(amax, 6.0f), global), whole = c->f->e4m3_256 ? 1536.0f : 2688.0f;
    const uint32_t candidate[2] = { ref_encode_small(GMM_E4M3, (double)base),
                                    ref_encode_small(GMM_E4M3, (double)times(base, 1.5f)) };
    float error[2];
    for (int k = 0; k < 2; k++) {
        const float factor = nv_factor(global, candidate[k]), scale = e4m3_of(candidate[k]);
        float line[16] = { 0.0f };
        for (int64_t i = 0; i < tall; i++)
            for (int64_t j = 0; j < n; j++) {
                const float v = x[i * c->along + j];
                const uint8_t code = ref_encode_small(GMM_E2M1, (double)times(v, factor));
                const float back = over(times(times((float)ref_decode_small(GMM_E2M1, code), scale), global_amax),
                                        whole);
                const float off = plus(back, -v);
                line[i] = plus(line[i], c->f->four_over_six == 2 ? times(off, off) : fabsf(off));
            }
        for (int distance = 8; distance; distance /= 2)
            for (int i = 0; i < distance; i++) line[i] = plus(line[i], line[i + distance]);
        error[k] = line[0];
    }
    return candidate[error[1] < error[0]];
}

/* Philox4x32 of 10 rounds: the 16 random bytes of a block. */
static void draw(const ref_copy *c, uint64_t block, uint8_t byte[16]) {
    uint32_t x[4] = { (uint32_t)block, (uint32_t)c->group ^ (uint32_t)(block >> 32) << 24, (uint32_t)c->offset,
                      (uint32_t)(c->offset >> 32) ^ (c->direction == GMM_COLUMNWISE ? 0x80000000u : 0u) };
    uint32_t key[2] = { (uint32_t)c->seed, (uint32_t)(c->seed >> 32) };
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)x[0] * 0xD2511F53u, b = (uint64_t)x[2] * 0xCD9E8D57u;
        const uint32_t next[4] = { (uint32_t)(b >> 32) ^ x[1] ^ key[0], (uint32_t)b,
                                   (uint32_t)(a >> 32) ^ x[3] ^ key[1], (uint32_t)a };
        memcpy(x, next, sizeof x);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    for (int i = 0; i < 16; i++) byte[i] = (uint8_t)(x[i / 4] >> i % 4 * 8);
}

static double step_of(double a) { return a < 2.0 ? 0.5 : a < 4.0 ? 1.0 : 2.0; }
static uint8_t encode_randomly(float v, uint8_t byte) {
    const double a = fabs((double)v);
    double t;
    if (isnan(v)) return 7;
    t = (double)(float)((double)byte / 256.0 * step_of(a) + a);
    t = a >= 6.0 || t >= 6.0 ? 6.0 : floor(t / step_of(t)) * step_of(t);
    return ref_encode_small(GMM_E2M1, copysign(t, (double)v));
}

/* Elements of a block along a line, and lines of one. */
static int64_t block_width(const gmm_format *f, int64_t along) {
    return f->scaling == GMM_SCALING_MX32 ? 32 : f->scaling == GMM_SCALING_NV16 ? 16
           : f->scaling == GMM_SCALING_1X128 || f->scaling == GMM_SCALING_128X128 ? 128 : along;
}
int64_t ref_line_blocks(const gmm_format *f, int64_t along) {
    const int64_t w = block_width(f, along);
    return w ? (along + w - 1) / w : 0;
}

static float largest_of(const float *x, int64_t n, float amax) {
    for (int64_t i = 0; i < n; i++)
        if (fabsf(x[i]) > amax) amax = fabsf(x[i]); /* ignores NaN */
    return amax;
}

/* A block of `tall` lines of n values: its scale as stored, and in *factor what multiplies its elements. */
static uint32_t block_scale(const ref_copy *c, int64_t line, int64_t tall, const float *x, int64_t n, float *factor) {
    const gmm_format *f = c->f;
    const float whole = f->row_amax ? c->line_amax[line] : c->amax;
    float amax = f->scaling == GMM_SCALING_TENSOR ? c->amax : 0.0f;
    uint32_t stored;
    for (int64_t i = 0; i < tall && f->scaling != GMM_SCALING_TENSOR; i++)
        amax = largest_of(x + i * c->along, n, amax);
    if (f->scaling == GMM_SCALING_MX32) {
        stored = mx_scale(f->dtype, amax);
        *factor = ldexpf(1.0f, 127 - (int)stored);
        return stored;
    }
    if (f->scaling == GMM_SCALING_NV16) {
        const float global = nv_global(f, whole), mult = times(global, (float)(1.0 / 6.0));
        stored = f->four_over_six ? four_over_six(c, global, whole, x, tall, n, amax)
                                  : ref_encode_small(GMM_E4M3, (double)times(amax, mult));
        *factor = nv_factor(global, stored);
        return stored;
    }
    *factor = f->delayed ? c->quant_scale : scale_by_amax(f, c->source, amax);
    return bits_of(over(1.0f, *factor));
}

void ref_quantize(ref_copy *c) {
    const gmm_format *f = c->f;
    const int64_t w = block_width(f, c->along);
    const int64_t h = f->scaling == GMM_SCALING_128X128 ? 128 : f->square ? w : 1;
    /* blocks of random bytes are numbered over the valid rows */
    const int64_t drawn = ref_line_blocks(f, c->direction == GMM_ROWWISE ? c->along : c->live);
    c->per_line = ref_line_blocks(f, c->along);
    c->amax = 0.0f;
    for (int64_t l = 0; l < c->lines; l++) {
        c->line_amax[l] = largest_of(c->x + l * c->along, c->along, 0.0f);
        if (c->line_amax[l] > c->amax) c->amax = c->line_amax[l];
    }
    for (int64_t l0 = 0; l0 < c->lines; l0 += h)
        for (int64_t b = 0; b < c->per_line; b++) {
            const int64_t n = c->along - b * w < w ? c->along - b * w : w;
            const int64_t tall = c->lines - l0 < h ? c->lines - l0 : h;
            float factor;
            const uint32_t stored = block_scale(c, l0, tall, c->x + l0 * c->along + b * w, n, &factor);
            for (int64_t l = l0; l < l0 + tall; l++) {
                uint8_t byte[16];
                c->scale[l * c->per_line + b] = stored;
                if (f->stochastic) draw(c, (uint64_t)(l * drawn + b), byte);
                for (int64_t i = 0; i < n; i++) {
                    const int64_t at = l * c->along + b * w + i;
                    const float v = times(c->x[at], factor);
                    c->code[at] = f->stochastic ? encode_randomly(v, byte[i]) : ref_encode_small(f->dtype, (double)v);
                }
            }
        }
}

static uint32_t scale_at(const ref_copy *c, int64_t l, int64_t i) {
    return c->scale[l * c->per_line + i / block_width(c->f, c->along)];
}
double ref_value(const ref_copy *c, int64_t l, int64_t i) {
    const double code = ref_decode_small(c->f->dtype, c->code[l * c->along + i]);
    const uint32_t scale = scale_at(c, l, i);
    if (c->f->scaling == GMM_SCALING_MX32) return code * ref_pow2((int)scale - 127);
    if (c->f->scaling != GMM_SCALING_NV16) return code * (double)float_of(scale);
    return code * (double)e4m3_of(scale) * (double)(c->f->row_amax ? c->line_amax[l] : c->amax) /
           (c->f->e4m3_256 ? 1536.0 : 2688.0);
}
/* For amaxes of NV16 below 2^100, from which on the product with a scale byte could overflow. */
float ref_dequantized(const ref_copy *c, int64_t l, int64_t i) {
    const float code = (float)ref_decode_small(c->f->dtype, c->code[l * c->along + i]);
    const uint32_t scale = scale_at(c, l, i);
    float factor;
    if (c->f->scaling == GMM_SCALING_MX32) return (float)ref_value(c, l, i);
    if (c->f->scaling != GMM_SCALING_NV16) return times(code, float_of(scale));
    factor = times(e4m3_of(scale), c->f->row_amax ? c->line_amax[l] : c->amax);
    return times(code, times(factor, (float)(1.0 / (c->f->e4m3_256 ? 1536.0 : 2688.0))));
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
