/* test_quant.c - codecs of 8 and 4 bits, scale rules, recipes and the host quantizer, bit for bit.
   References: values in double, and NVIDIA's host conversions where the CUDA headers are installed. */
#include "test.h"

#include <math.h>
#include <string.h>
#ifdef HAVE_CUDA_HEADERS
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#endif

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

/* ------------------------------------------------------------------------------------------------------ Codecs --- */

typedef struct small_format {
    const char *name;
    int codes, exponent, mantissa, bias, largest; /* largest: code of the largest finite value */
    float (*decode)(uint8_t);
    uint8_t (*encode)(float), (*nosat)(float);
} small_format;

static float e4m3_out(uint8_t c) { return gmm_e4m3_to_f32(c); }
static float e5m2_out(uint8_t c) { return gmm_e5m2_to_f32(c); }
static float e2m1_out(uint8_t c) { return gmm_e2m1_to_f32(c); }
static uint8_t e4m3_in(float v) { return gmm_f32_to_e4m3(v); }
static uint8_t e5m2_in(float v) { return gmm_f32_to_e5m2(v); }
static uint8_t e2m1_in(float v) { return gmm_f32_to_e2m1(v); }
static uint8_t e4m3_open(float v) { return gmm_f32_to_e4m3_nosat(v); }
static uint8_t e5m2_open(float v) { return gmm_f32_to_e5m2_nosat(v); }
static const small_format formats[] = {
    { "e4m3", 256, 4, 3, 7, 0x7E, e4m3_out, e4m3_in, e4m3_open },
    { "e5m2", 256, 5, 2, 15, 0x7B, e5m2_out, e5m2_in, e5m2_open },
    { "e2m1", 16, 2, 1, 1, 0x7, e2m1_out, e2m1_in, NULL }
};

/* Value of a code by the definition of its format; NaN and infinities where the format has them. */
static double value_of(const small_format *f, int code) {
    const int half = f->codes / 2, a = code % half, e = a >> f->mantissa, m = a & ((1 << f->mantissa) - 1);
    double v = e ? ldexp((double)((1 << f->mantissa) + m), e - f->bias - f->mantissa)
                 : ldexp((double)m, 1 - f->bias - f->mantissa);
    if (a > f->largest) v = f->exponent == 5 && m == 0 ? (double)INFINITY : (double)NAN;
    return code >= half ? -v : v;
}

/* Nearest finite code of |v|, even codes at ties; saturates. */
static int nearest_of(const small_format *f, double v) {
    const double a = fabs(v);
    int low = 0, high = f->largest;
    if (isnan(v)) return f->codes == 16 ? 7 : 0x7F;
    while (high - low > 1) {
        const int mid = (low + high) / 2;
        if (value_of(f, mid) <= a) low = mid;
        else high = mid;
    }
    {
        const double down = a - value_of(f, low), up = value_of(f, high) - a;
        const int q = a >= value_of(f, high) || up < down || (up == down && high % 2 == 0) ? high : low;
        return q + (signbit(v) ? f->codes / 2 : 0);
    }
}

static void decode_all(int arg) {
    const small_format *f = &formats[arg];
    for (int c = 0; c < f->codes; c++) {
        const double want = value_of(f, c);
        const float got = f->decode((uint8_t)c);
        T_CHECK(isnan(want) ? isnan(got) : (double)got == want && !signbit(got) == !signbit(want), "%s %02x gives %g",
                f->name, (unsigned)c, (double)got);
        if (!isnan(want) && !isinf(want))
            T_CHECK(f->encode(got) == c, "%s %02x comes back as %02x", f->name, (unsigned)c, f->encode(got));
    }
}

#ifdef HAVE_CUDA_HEADERS
static int header_code(int format, float v, int saturate) {
    if (format == 2) return __nv_cvt_float_to_fp4(v, __NV_E2M1, cudaRoundNearest) & 15;
    return __nv_cvt_float_to_fp8(v, saturate ? __NV_SATFINITE : __NV_NOSAT, format ? __NV_E5M2 : __NV_E4M3);
}
#endif

static void encode_one(int format, uint32_t u) {
    const small_format *f = &formats[format];
    const float v = float_of(u);
    const int got = f->encode(v), want = nearest_of(f, (double)v);
    T_CHECK(got == want, "%s of %08x (%g): %02x instead of %02x", f->name, u, (double)v, (unsigned)got, (unsigned)want);
#ifdef HAVE_CUDA_HEADERS
    T_CHECK(got == header_code(format, v, 1), "%s of %08x: %02x, cuda %02x", f->name, u, (unsigned)got,
            (unsigned)header_code(format, v, 1));
    if (f->nosat)
        T_CHECK(f->nosat(v) == header_code(format, v, 0), "%s unsaturated of %08x: %02x, cuda %02x", f->name, u,
                f->nosat(v), (unsigned)header_code(format, v, 0));
#endif
}

/* All 65536 inputs of BF16 and of FP16. */
static void encode_halves(int arg) {
    for (uint32_t u = 0; u < 0x10000u; u++) {
        encode_one(arg, u << 16);
        encode_one(arg, bits_of(gmm_f16_to_f32((uint16_t)u)));
    }
}
/* fp32: around every value and every midpoint, then a stride through all patterns. */
static void encode_floats(int arg) {
    const small_format *f = &formats[arg];
    for (int c = 0; c < f->largest; c++) {
        const float low = (float)value_of(f, c), mid = (float)((value_of(f, c) + value_of(f, c + 1)) / 2.0);
        for (uint32_t d = 0; d < 7; d++) {
            encode_one(arg, bits_of(low) + d - (bits_of(low) >= 3 ? 3 : 0));
            encode_one(arg, bits_of(mid) - 3 + d);
            encode_one(arg, (bits_of(mid) - 3 + d) | 0x80000000u);
        }
    }
    for (uint64_t u = 0; u < 0x100000000u; u += 2503) encode_one(arg, (uint32_t)u);
    encode_one(arg, 0xFFFFFFFFu);
}

static void e8m0_one(uint32_t u) {
    const float v = float_of(u);
    const double a = fabs((double)v);
    int want = 255, exponent;
    if (isinf(a)) want = 254;
    else if (!isnan(a)) {
        const double m = frexp(a, &exponent); /* a = m 2^exponent, m in [0.5, 1) */
        want = a == 0.0 ? 0 : (m == 0.5 ? exponent - 1 : exponent) + 127;
        want = want < 0 ? 0 : want > 254 ? 254 : want;
    }
    T_CHECK(gmm_f32_to_e8m0(v) == want, "e8m0 of %08x: %02x instead of %02x", u, gmm_f32_to_e8m0(v), (unsigned)want);
#ifdef HAVE_CUDA_HEADERS
    T_CHECK(gmm_f32_to_e8m0(v) == __nv_cvt_float_to_e8m0(v, __NV_SATFINITE, cudaRoundPosInf), "e8m0 of %08x, cuda", u);
    T_CHECK(gmm_f32_to_e8m0_nosat(v) == __nv_cvt_float_to_e8m0(v, __NV_NOSAT, cudaRoundPosInf),
            "e8m0 unsaturated of %08x, cuda", u);
#endif
}
static void e8m0(int arg) {
    (void)arg;
    for (int k = 0; k < 256; k++) {
        const float v = gmm_e8m0_to_f32((uint8_t)k), r = gmm_e8m0_reciprocal((uint8_t)k);
        if (k == 255) T_CHECK(isnan(v) && isnan(r), "code ff");
        else {
            T_CHECK((double)v == ldexp(1.0, k - 127) && (double)r == ldexp(1.0, 127 - k), "code %02x", (unsigned)k);
            T_CHECK(gmm_f32_to_e8m0(v) == k, "code %02x comes back as %02x", (unsigned)k, gmm_f32_to_e8m0(v));
        }
    }
    for (uint32_t u = 0; u < 0x10000u; u++) {
        e8m0_one(u << 16);
        e8m0_one((u << 16) + 1u);
        e8m0_one(bits_of(gmm_f16_to_f32((uint16_t)u)));
    }
    for (uint64_t u = 0; u < 0x100000000u; u += 1009) e8m0_one((uint32_t)u);
}

/* Exact values, ties and their neighbours, subnormals, overflow, Inf and NaN, as fp32 bits and the codes with and
   without saturation. */
static void vectors_codecs(int arg) {
    static const uint32_t e4m3[][3] = {
        { 0x00000000, 0x00, 0x00 }, { 0x80000000, 0x80, 0x80 }, { 0x3A800000, 0x00, 0x00 }, { 0x3A800001, 0x01, 0x01 },
        { 0x3B400000, 0x02, 0x02 }, { 0x3BA00000, 0x02, 0x02 }, { 0x3F880000, 0x38, 0x38 }, { 0x3F980000, 0x3A, 0x3A },
        { 0x41880000, 0x58, 0x58 }, { 0x43DF8000, 0x7E, 0x7E }, { 0x43E00000, 0x7E, 0x7E }, { 0x43E80000, 0x7E, 0x7E },
        { 0x43E80001, 0x7E, 0x7F }, { 0x43F00000, 0x7E, 0x7F }, { 0x7F800000, 0x7E, 0x7F }, { 0xFF800000, 0xFE, 0xFF },
        { 0x7FC00000, 0x7F, 0x7F }, { 0xFFC00000, 0x7F, 0x7F }, { 0x3D880000, 0x18, 0x18 },
        { 0x3C800000, 0x08, 0x08 } };
    static const uint32_t e5m2[][3] = {
        { 0x37000000, 0x00, 0x00 }, { 0x37400000, 0x01, 0x01 }, { 0x37C00000, 0x02, 0x02 }, { 0x38400000, 0x03, 0x03 },
        { 0x38800000, 0x04, 0x04 }, { 0x3F900000, 0x3C, 0x3C }, { 0x3FB00000, 0x3E, 0x3E }, { 0x47600000, 0x7B, 0x7B },
        { 0x476FFF00, 0x7B, 0x7B }, { 0x47700000, 0x7B, 0x7C }, { 0x47800000, 0x7B, 0x7C }, { 0xFF800000, 0xFB, 0xFC },
        { 0x7FC00000, 0x7F, 0x7F } };
    static const uint32_t e2m1[][2] = {
        { 0x3E800000, 0x0 }, { 0xBE800000, 0x8 }, { 0x3E800001, 0x1 }, { 0x3F400000, 0x2 }, { 0x3F3FFFFF, 0x1 },
        { 0x3FA00000, 0x2 }, { 0x3FA00001, 0x3 }, { 0x3FE00000, 0x4 }, { 0x3FDFFFFF, 0x3 }, { 0x40200000, 0x4 },
        { 0x40200001, 0x5 }, { 0x40600000, 0x6 }, { 0x405FFFFF, 0x5 }, { 0x40A00000, 0x6 }, { 0x40A00001, 0x7 },
        { 0x40E00000, 0x7 }, { 0x7149F2CA, 0x7 }, { 0x7F800000, 0x7 }, { 0xFF800000, 0xF }, { 0x7FC00000, 0x7 },
        { 0xFFC00000, 0x7 }, { 0x8DA24260, 0x8 } };
    static const uint32_t e8[][3] = {
        { 0x00000000, 0x00, 0x00 }, { 0x00000001, 0x00, 0x00 }, { 0x00400000, 0x00, 0x00 }, { 0x00400001, 0x01, 0x01 },
        { 0x007FFFFF, 0x01, 0x01 }, { 0x00800000, 0x01, 0x01 }, { 0x00800001, 0x02, 0x02 }, { 0x3F800000, 0x7F, 0x7F },
        { 0x3F800001, 0x80, 0x80 }, { 0xC0400000, 0x81, 0x81 }, { 0x7F000000, 0xFE, 0xFE }, { 0x7F000001, 0xFE, 0xFF },
        { 0x7F7FFFFF, 0xFE, 0xFF }, { 0x7F800000, 0xFE, 0xFF }, { 0x7FC00000, 0xFF, 0xFF } };
    (void)arg;
    for (int i = 0; i < T_COUNT(e4m3); i++)
        T_CHECK(gmm_f32_to_e4m3(float_of(e4m3[i][0])) == e4m3[i][1] &&
                gmm_f32_to_e4m3_nosat(float_of(e4m3[i][0])) == e4m3[i][2], "e4m3 of %08x", e4m3[i][0]);
    for (int i = 0; i < T_COUNT(e5m2); i++)
        T_CHECK(gmm_f32_to_e5m2(float_of(e5m2[i][0])) == e5m2[i][1] &&
                gmm_f32_to_e5m2_nosat(float_of(e5m2[i][0])) == e5m2[i][2], "e5m2 of %08x", e5m2[i][0]);
    for (int i = 0; i < T_COUNT(e2m1); i++)
        T_CHECK(gmm_f32_to_e2m1(float_of(e2m1[i][0])) == e2m1[i][1], "e2m1 of %08x", e2m1[i][0]);
    for (int i = 0; i < T_COUNT(e8); i++)
        T_CHECK(gmm_f32_to_e8m0(float_of(e8[i][0])) == e8[i][1] &&
                gmm_f32_to_e8m0_nosat(float_of(e8[i][0])) == e8[i][2], "e8m0 of %08x", e8[i][0]);
    for (int c = 0; c < 256; c++) {
        const uint8_t byte = (uint8_t)c;
        T_CHECK(isnan(gmm_e5m2_to_f32(byte)) ? isnan(gmm_f16_to_f32((uint16_t)(c << 8)))
                                             : gmm_e5m2_to_f32(byte) == gmm_f16_to_f32((uint16_t)(c << 8)), "%02x", c);
        T_CHECK((gmm_nibble(&byte, 0) | gmm_nibble(&byte, 1) << 4) == c, "nibbles of %02x", (unsigned)c);
    }
    {
        const uint8_t pair = 0x72;
        T_CHECK(gmm_nibble(&pair, 0) == gmm_f32_to_e2m1(1.0f) && gmm_nibble(&pair, 1) == gmm_f32_to_e2m1(6.0f),
                "nibbles of 0x72");
    }
    T_CHECK(bits_of(gmm_e8m0_to_f32(0)) == 0x00400000u && bits_of(gmm_e8m0_reciprocal(254)) == 0x00400000u, "2^-127");
    { /* a cast by strict comparisons would round ties of odd codes down and drop the sign of zero */
        static const float limit[7] = { 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f };
        for (int i = 0; i < 7; i++)
            for (int sign = 0; sign < 2; sign++)
                for (int off = -1; off <= 1; off++) {
                    const uint32_t u = bits_of(limit[i]) + (uint32_t)off;
                    const float x = float_of(u | (uint32_t)sign << 31);
                    uint8_t strict = 0;
                    for (int j = 0; j < 7; j++) strict = (uint8_t)(strict + (fabsf(x) > limit[j]));
                    strict = (uint8_t)(strict | (strict && sign ? 8 : 0));
                    if (off == 0 && (i & 1)) strict++;
                    if (strict == 0 && sign) strict = 8;
                    T_CHECK(gmm_f32_to_e2m1(x) == (strict | sign << 3), "%08x gives %x", bits_of(x),
                            (unsigned)gmm_f32_to_e2m1(x));
                }
        T_CHECK(gmm_f32_to_e2m1(float_of(0x80000000u)) == 8, "-0");
    }
    { /* a word of four exponents; 2^-127 becomes 0 */
        const float scale[4] = { 1.0f, 2.0f, 0.5f, float_of(0x77u << 23) }, least[4] = { float_of(0x00400000u), 1.0f };
        T_CHECK(gmm_scale_exponents(scale) == 0x777E807Fu, "%08x", (unsigned)gmm_scale_exponents(scale));
        T_CHECK(gmm_scale_exponents(least) == 0x00007F00u, "%08x", (unsigned)gmm_scale_exponents(least));
        for (uint32_t e = 0; e < 4 * 255; e++) { /* every exponent at every byte */
            float one[4] = { 1.0f, 1.0f, 1.0f, 1.0f };
            const uint32_t place = e % 4, k = e / 4;
            one[place] = gmm_e8m0_to_f32((uint8_t)k);
            T_CHECK(gmm_scale_exponents(one) == ((0x7F7F7F7Fu & ~(0xFFu << 8 * place)) | k << 8 * place), "%02x",
                    k);
        }
    }
}

/* Packed codes transposed, and transposed back. The library transposes codes where both copies of a square format
   hold the same ones. */
static void packed_turn(int arg) {
    enum { N = 32 };
    static float x[GMM_TILE * GMM_TILE];
    static uint8_t code[2][GMM_TILE * GMM_TILE];
    uint8_t packed[3][N * N / 2];
    uint32_t scale[GMM_TILE * GMM_TILE_BLOCKS];
    gmm_format f = gmm_recipe_of(GMM_RECIPE_NVFP4).weight;
    float amax = 0.0f;
    int differ = 0;
    gmm_tile t = GMM_ZERO;
    (void)arg;
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++)
                if (k == 0) {
                    x[i * GMM_TILE + j] = (float)t_real();
                    if (fabsf(x[i * GMM_TILE + j]) > amax) amax = fabsf(x[i * GMM_TILE + j]);
                } else if (i < j) {
                    const float other = x[i * GMM_TILE + j];
                    x[i * GMM_TILE + j] = x[j * GMM_TILE + i];
                    x[j * GMM_TILE + i] = other;
                }
        t.format = &f;
        t.source = GMM_F32;
        t.lines = t.along = N;
        t.x = x;
        t.amax = &amax;
        gmm_quantize_tile(&t, code[k], scale);
    }
    for (int k = 0; k < 3; k++) /* rowwise codes, transposed, and transposed back */
        for (int i = 0; i < N * N; i += 2) {
            uint8_t low, high;
            const int j = i + 1;
            if (k == 0) {
                low = code[0][i / N * GMM_TILE + i % N];
                high = code[0][j / N * GMM_TILE + j % N];
            } else {
                low = gmm_nibble(packed[k - 1], i % N * N + i / N);
                high = gmm_nibble(packed[k - 1], j % N * N + j / N);
            }
            packed[k][i / 2] = (uint8_t)(low | high << 4);
        }
    for (int i = 0; i < N * N; i++)
        T_CHECK(gmm_nibble(packed[1], i) == code[1][i / N * GMM_TILE + i % N], "element %d of the turned copy", i);
    T_CHECK(!memcmp(packed[0], packed[2], sizeof packed[0]), "turned twice");
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N / 2; j++) differ += packed[1][i * N / 2 + j] != packed[0][j % N * N / 2 + i / 2];
    T_CHECK(differ > 0, "turning bytes would have done");
}

/* -------------------------------------------------------------------------------------------------- Scale rules --- */

static void scales_mx(int arg) {
    static const struct { uint32_t amax; int e4m3, e5m2; } rows[] = {
        { 0x00000000, 0x00, 0x00 }, { 0x3F800000, 0x77, 0x70 }, { 0x3FE00000, 0x77, 0x70 }, { 0x3FE10000, 0x78, 0x71 },
        { 0x40600000, 0x78, 0x71 }, { 0x43E00000, 0x7F, 0x78 }, { 0x43E10000, 0x80, 0x79 }, { 0x7F7F0000, 0xF7, 0xF0 },
        { 0x7F800000, 0xFE, 0xFE }, { 0x04600000, 0x00, -1 }, { 0x04600001, 0x00, -1 }, { 0x07E00001, -1, 0x00 } };
    (void)arg;
    for (int i = 0; i < T_COUNT(rows); i++) {
        const float amax = float_of(rows[i].amax);
        T_CHECK(rows[i].e4m3 < 0 || gmm_mx_scale(amax, GMM_E4M3) == rows[i].e4m3, "amax %08x: %02x", rows[i].amax,
                gmm_mx_scale(amax, GMM_E4M3));
        T_CHECK(rows[i].e5m2 < 0 || gmm_mx_scale(amax, GMM_E5M2) == rows[i].e5m2, "amax %08x: %02x", rows[i].amax,
                gmm_mx_scale(amax, GMM_E5M2));
    }
    for (uint32_t u = 1; u < 0x7F80u; u++) { /* all bf16: the smallest power of two that fits, or its exponent */
        const float amax = float_of(u << 16);
        for (int d = 0; d < 3; d++) {
            const gmm_dtype dtype = d == 0 ? GMM_E4M3 : d == 1 ? GMM_E5M2 : GMM_E2M1;
            const double qmax = d == 0 ? 448.0 : d == 1 ? 57344.0 : 6.0;
            const int k = gmm_mx_scale(amax, dtype);
            T_CHECK(ldexp((double)amax, 127 - k) <= qmax && (k == 0 || ldexp((double)amax, 128 - k) > qmax),
                    "amax %04x, dtype %d: k = %d", u, (int)dtype, k);
        }
        T_CHECK((double)gmm_scale_from_amax(amax, 448.0f, float_of(0x7F7F0000u), 0.0f, 1) ==
                ldexp(1.0, 127 - gmm_mx_scale(amax, GMM_E4M3)), "amax %04x", u);
    }
}

/* fp32 amaxes around the largest value times every power of two, and random ones, get the smallest power of two
   that fits, except for one per dtype whose product is subnormal. */
static void scales_mx_floats(int arg) {
    static const gmm_dtype dtypes[3] = { GMM_E4M3, GMM_E5M2, GMM_E2M1 };
    static const uint32_t largest[3] = { 0x43E00000u, 0x47600000u, 0x40C00000u };
    static const uint32_t exception[3] = { 0x04600001u, 0x07E00001u, 0x01400001u };
    const double qmax = (double)float_of(largest[arg]);
    int met = 0;
    for (int64_t n = 0; n < 254 * 401 + 2000000; n++) {
        const uint32_t near = (largest[arg] & 0x7FFFFFu) | (uint32_t)(n / 401 + 1) << 23;
        const uint32_t u = n < 254 * 401 ? near - 200u + (uint32_t)(n % 401) : (uint32_t)t_rand() % 0x7F800000u;
        const double amax = (double)float_of(u);
        const int k = gmm_mx_scale(float_of(u), dtypes[arg]);
        met += u == exception[arg];
        T_CHECK((amax <= ldexp(qmax, k - 127) && (k == 0 || amax > ldexp(qmax, k - 128))) ||
                (u == exception[arg] && k == 0), "amax %08x: %02x", u, (unsigned)k);
    }
    T_CHECK(met > 0, "the exception was not met");
}

static void scales_tensor(int arg) { /* named amaxes, with scales of fp32 and of powers of two; every bf16 amax */
    static const struct { uint32_t amax, scale, inverse, scale2, inverse2; } rows[] = {
        { 0x3F800000, 0x43E00000, 0x3B124925, 0x43800000, 0x3B800000 },
        { 0x40400000, 0x43155555, 0x3BDB6DB7, 0x43000000, 0x3C000000 },
        { 0x42C80000, 0x408F5C29, 0x3E649249, 0x40800000, 0x3E800000 },
        { 0x3DCCCCCD, 0x458C0000, 0x396A0EA1, 0, 0 },
        { 0x7F7F0000, 0x03E0E0E1, 0x7B11B6DB, 0x03800000, 0x7B800000 },
        { 0x00010000, 0x7F7FFFFF, 0x00200000, 0x7F000000, 0x00400000 },
        { 0x00000000, 0x3F800000, 0x3F800000, 0x3F800000, 0x3F800000 },
        { 0x7F800000, 0x3F800000, 0x3F800000, 0x3F800000, 0x3F800000 },
        { 0x7FC00000, 0x3F800000, 0x3F800000, 0x3F800000, 0x3F800000 } };
    (void)arg;
    for (int i = 0; i < T_COUNT(rows); i++)
        for (int pow2 = 0; pow2 < 2; pow2++) {
            const float largest = float_of(pow2 ? 0x7F7F0000u : 0x7F7FFFFFu);
            const float s = gmm_scale_from_amax(float_of(rows[i].amax), 448.0f, largest, 0.0f, pow2);
            if (pow2 && !rows[i].scale2) continue;
            T_CHECK(bits_of(s) == (pow2 ? rows[i].scale2 : rows[i].scale) &&
                    bits_of(gmm_scale_inverse(s)) == (pow2 ? rows[i].inverse2 : rows[i].inverse),
                    "scale %d, pow2 %d: %08x %08x", i, pow2, bits_of(s), bits_of(gmm_scale_inverse(s)));
        }
    T_CHECK(gmm_f32_to_e4m3(float_of(0x00010000u) * float_of(0x7F7FFFFFu)) == 0x10, "the largest scale");
    T_CHECK(gmm_f32_to_e4m3(float_of(0x00010000u) * float_of(0x7F000000u)) == 0x08, "the largest power of two");
    T_CHECK(bits_of(gmm_scale_from_amax(1.0f, 57344.0f, 1.0f, 0.0f, 0)) == 0x47600000u, "e5m2 of 1");
    T_CHECK(bits_of(gmm_scale_from_amax(3.0f, 57344.0f, 1.0f, 0.0f, 0)) == 0x46955555u, "e5m2 of 3");
    T_CHECK(gmm_scale_from_amax(1e-6f, 448.0f, 1.0f, 1e-4f, 0) == 448.0f / 1e-4f, "eps");
    T_CHECK(gmm_scale_from_amax(0.0f, 448.0f, 1.0f, 1e-4f, 0) == 448.0f / 1e-4f, "eps of zero");
    for (uint32_t u = 1; u < 0x7F80u; u++) {
        const float amax = float_of(u << 16), s = gmm_scale_from_amax(amax, 448.0f, float_of(0x7F7FFFFFu), 0.0f, 0);
        T_CHECK(gmm_f32_to_e4m3(gmm__fmul(amax, s)) == 0x7E || u <= 0x03D8u, "amax %04x is not 448", u);
    }
}

static void scales_nv(int arg) { /* of amax: S, 1 / S, S / 6; of blocks: the code and its encoding factor */
    static const struct { uint32_t amax, scale, inverse, mult; } globals[] = {
        { 0x3F800000, 0x45280000, 0x39C30C31, 0x43E00000 }, { 0x40400000, 0x44600000, 0x3A924925, 0x43155556 },
        { 0x40C00000, 0x43E00000, 0, 0 }, { 0x45280000, 0x3F800000, 0, 0x3E2AAAAB },
        { 0x42C80000, 0x41D70A3D, 0x3D186186, 0x408F5C29 }, { 0x00000000, 0x3F800000, 0, 0 },
        { 0x7F800000, 0x3F800000, 0, 0 } };
    static const struct { float global, block; uint32_t scale, encode; } blocks[] = {
        { 1.0f, 1.0f, 0x7E, 0x40C00000 }, { 1.0f, 0.5f, 0x76, 0x41400000 }, { 1.0f, 1.0f / 3.0f, 0x71, 0x41955555 },
        { 1.0f, 1e-3f, 0x2E, 0x45C00000 }, { 1.0f, 1e-5f, 0x02, 0x49280000 }, { 1.0f, 2e-6f, 0x00, 0x7F7FFFFF },
        { 3.0f, 3.0f, 0x7E, 0x40000000 }, { 3.0f, 1.5f, 0x76, 0x40800000 }, { 3.0f, 1.0f, 0x71, 0x40C71C71 },
        { 6.0f, 6.0f, 0x7E, 0x3F800000 }, { 2688.0f, 2688.0f, 0x7E, 0x3B124925 },
        { 100.0f, 100.0f, 0x7E, 0x3D75C290 } };
    gmm_nv_global n;
    (void)arg;
    for (int i = 0; i < T_COUNT(globals); i++) {
        n = gmm_nv_global_of(float_of(globals[i].amax), 448.0f);
        T_CHECK(bits_of(n.scale) == globals[i].scale, "global %d: S = %08x", i, bits_of(n.scale));
        T_CHECK(!globals[i].inverse || bits_of(n.inverse) == globals[i].inverse, "global %d: %08x", i,
                bits_of(n.inverse));
        T_CHECK(!globals[i].mult || bits_of(n.mult) == globals[i].mult, "global %d: %08x", i, bits_of(n.mult));
    }
    for (int i = 0; i < T_COUNT(blocks); i++) {
        uint8_t sf;
        n = gmm_nv_global_of(blocks[i].global, 448.0f);
        sf = gmm_nv_scale(&n, blocks[i].block);
        T_CHECK(sf == blocks[i].scale && bits_of(gmm_nv_encode(&n, sf)) == blocks[i].encode, "block %d: %02x %08x", i,
                sf, bits_of(gmm_nv_encode(&n, sf)));
        T_CHECK(gmm_f32_to_e2m1(gmm__fmul(blocks[i].block, gmm_nv_encode(&n, sf))) == 7, "block %d: code", i);
    }
    n = gmm_nv_global_of(1.0f, 448.0f);
    T_CHECK(gmm_nv_scale(&n, float_of(0x36124926u)) == 1 && gmm_nv_scale(&n, float_of(0x36124925u)) == 0, "code 1");
    T_CHECK(gmm_nv_scale(&n, 0.0f) == 0, "zero block");
    T_CHECK(gmm_nv_decode(0, 1.0f, 448.0f) == 0.0f && gmm_nv_decode(0, 3e38f, 448.0f) == 0.0f, "decoded 0");
    T_CHECK(bits_of(gmm_nv_decode(0x38, 1.0f, 448.0f)) == 0x39C30C31u, "decoded 1");
    T_CHECK(bits_of(gmm_nv_decode(0x38, 1.0f, 256.0f)) == bits_of(1.0f / 1536.0f), "decoded 1, with codes to 256");
    T_CHECK(bits_of(1.0f / (2688.0f * 2688.0f)) == 0x34149B93u, "the factor of products"); /* exact_nv */
    {
        int64_t pairs = 0;
        for (uint32_t m = 0; m < 128; m++) { /* every mantissa of the tensor's amax, every BF16 amax of a block */
            const uint32_t top = 0x3F80u + m;
            n = gmm_nv_global_of(float_of(top << 16), 448.0f);
            for (uint32_t u = 1; u <= top; u++, pairs++) {
                const float block = float_of(u << 16);
                const uint8_t sf = gmm_nv_scale(&n, block);
                T_CHECK(sf <= 0x7E && (u < top || sf == 0x7E), "%04x %04x: scale %02x", top, u, sf);
                T_CHECK(sf < 4 || gmm_f32_to_e2m1(gmm__fmul(block, gmm_nv_encode(&n, sf))) == 7, "%04x %04x", top,
                        u);
            }
        }
        T_CHECK(pairs > 2080000, "%lld pairs", (long long)pairs);
    }
    for (uint32_t u = 1; u < 0x7F80u; u++) { /* a block with the tensor's amax: code 6 unless 2688 / amax is Inf */
        const float amax = float_of(u << 16);
        uint8_t sf;
        n = gmm_nv_global_of(amax, 448.0f);
        sf = gmm_nv_scale(&n, amax);
        if (!isinf(2688.0f / amax))
            T_CHECK(sf == 0x7E && gmm_f32_to_e2m1(gmm__fmul(amax, gmm_nv_encode(&n, sf))) == 7, "own block of %04x", u);
        else T_CHECK(bits_of(n.scale) == 0x7F7FFFFFu && bits_of(n.inverse) == 0x00200000u, "tiny amax %04x", u);
    }
}

/* --------------------------------------------------------------------------- Hadamard, random numbers, rounding --- */

static void hadamard(int arg) { /* a unit vector, ones, a ramp; products and the inverse */
    static const float ones[16] = { -1, 0, 1, 0, 1, 0, -1, 0, 1, 2, 1, 0, 1, 0, 1, -2 };
    static const float ramp[16] = { -14.5f, -7.5f, 6.5f, -.5f, 6.5f, -.5f, -14.5f, 8.5f,
                                    7.5f, 14.5f, .5f, 1.5f, .5f, -2.5f, 9.5f, -15.5f };
    float x[16], y[16];
    (void)arg;
    for (int i = 0; i < 16; i++) { x[i] = i == 3; y[i] = i % 4 == 1 || i % 4 == 2 ? .25f : -.25f; }
    gmm_hadamard16(x, GMM_HADAMARD_SIGNS);
    for (int i = 0; i < 16; i++) T_CHECK(x[i] == y[i], "element %d is %g", i, (double)x[i]);
    for (int i = 0; i < 16; i++) x[i] = 1.0f;
    gmm_hadamard16(x, GMM_HADAMARD_SIGNS);
    for (int i = 0; i < 16; i++) T_CHECK(x[i] == ones[i], "element %d is %g", i, (double)x[i]);
    for (int i = 0; i < 16; i++) x[i] = (float)i;
    gmm_hadamard16(x, GMM_HADAMARD_SIGNS);
    for (int i = 0; i < 16; i++) T_CHECK(x[i] == ramp[i], "element %d is %g", i, (double)x[i]);
    for (int n = 0; n < 2000; n++) {
        float a[16], b[16], back[16];
        double before = 0.0, after = 0.0;
        for (int i = 0; i < 16; i++) {
            a[i] = x[i] = (float)t_int(-3, 3);
            b[i] = y[i] = (float)t_int(-3, 3);
            before += (double)a[i] * b[i];
        }
        gmm_hadamard16(x, GMM_HADAMARD_SIGNS);
        gmm_hadamard16(y, GMM_HADAMARD_SIGNS);
        for (int i = 0; i < 16; i++) after += (double)x[i] * y[i];
        T_CHECK(before == after, "%g becomes %g", before, after);
        for (int i = 0; i < 16; i++) { /* x = s (y H / 4), by the definition of H */
            double sum = 0.0;
            for (int j = 0; j < 16; j++) sum += (__builtin_popcount((unsigned)(i & j)) & 1 ? -1.0 : 1.0) * (double)x[j];
            back[i] = (float)(sum * 0.25) * (GMM_HADAMARD_SIGNS >> i & 1 ? -1.0f : 1.0f);
            T_CHECK(back[i] == a[i], "not its own inverse");
        }
    }
}

static void philox(int arg) {
    static const struct { uint32_t counter[4]; uint64_t key; uint32_t want[4]; } rows[] = {
        { { 0, 0, 0, 0 }, 0, { 0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8 } },
        { { 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF }, 0xFFFFFFFFFFFFFFFFu,
          { 0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD } },
        { { 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344 }, 0x299F31D0A4093822u,
          { 0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1 } } };
    (void)arg;
    for (int i = 0; i < T_COUNT(rows); i++) {
        uint32_t out[4];
        gmm_philox(rows[i].counter, rows[i].key, out);
        t_same("philox", out, rows[i].want, sizeof out);
    }
    /* every bit of every argument changes the random word, and no two words are equal; the direction is the last bit of
       the offset */
    {
        static const int bits[4] = { 64, 63, 24, 40 };
        uint32_t draw[64 + 63 + 24 + 40 + 2][4];
        int n = 0;
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < bits[k]; i++) {
                const uint64_t flip = (uint64_t)1 << i;
                gmm_draw_block(k == 0 ? flip ^ 1u : 1, k == 1 ? flip ^ 2u : 2, k == 2 ? (int64_t)(flip ^ 3u) : 3,
                               k == 3 ? (int64_t)(flip ^ 4u) : 4, GMM_ROWWISE, draw[n++]);
            }
        gmm_draw_block(1, 2, 3, 4, GMM_ROWWISE, draw[n++]);
        gmm_draw_block(1, 2, 3, 4, GMM_COLUMNWISE, draw[n++]);
        T_CHECK(n == T_COUNT(draw), "%d draws", n);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < i; j++) T_CHECK(memcmp(draw[i], draw[j], 16), "draws %d and %d are equal", i, j);
    }
    for (int i = 0; i < 1000; i++) { /* the counter layout is fixed: checkpoints and other programs depend on it */
        const uint64_t seed = t_rand(), offset = t_rand() >> 1;
        const int64_t group = t_int(0, (1 << 24) - 1), block = t_int(0, ((int64_t)1 << 40) - 1);
        const uint32_t direction = (uint32_t)i & 1u;
        const uint32_t counter[4] = { (uint32_t)block, (uint32_t)(group + (block >> 32) * (1 << 24)), (uint32_t)offset,
                                      (uint32_t)(offset >> 32) + direction * 0x80000000u };
        uint32_t got[4], want[4];
        gmm_draw_block(seed, offset, group, block, (gmm_direction)direction, got);
        gmm_philox(counter, seed, want);
        t_same("a draw", got, want, sizeof got);
    }
}

/* Stochastic rounding as specified, in double. */
static int random_code(double v, unsigned byte) {
    const double a = fabs(v), step = a < 2.0 ? 0.5 : a < 4.0 ? 1.0 : 2.0;
    double t = (double)(float)(a + (double)byte / 256.0 * step), q;
    const double unit = t < 2.0 ? 0.5 : t < 4.0 ? 1.0 : 2.0;
    q = floor(t / unit) * unit;
    if (q > 6.0) q = 6.0;
    return nearest_of(&formats[2], signbit(v) ? -q : q);
}
static void stochastic(int arg) { /* the random byte at which each value is rounded up; codes, NaN and Inf stay */
    (void)arg;
    for (unsigned u = 0; u < 256; u++) {
        T_CHECK(gmm_f32_to_e2m1_random(1.9f, u) == (u <= 51 ? 3 : 4), "%u", u);
        T_CHECK(gmm_f32_to_e2m1_random(.1f, u) == (u >= 205), "%u", u);
        T_CHECK(gmm_f32_to_e2m1_random(4.5f, u) == (u >= 192 ? 7 : 6), "%u", u);
        T_CHECK(gmm_f32_to_e2m1_random(5.9f, u) == (u >= 13 ? 7 : 6), "%u", u);
        for (int c = 0; c < 16; c++)
            T_CHECK(gmm_f32_to_e2m1_random(gmm_e2m1_to_f32((uint8_t)c), u) == c, "code %d moves at %u", c, u);
        T_CHECK(gmm_f32_to_e2m1_random(float_of(0x7FC00000u), u) == 7 &&
                gmm_f32_to_e2m1_random(float_of(0xFFC00000u), u) == 7, "NaN");
        T_CHECK(gmm_f32_to_e2m1_random(float_of(0xFF800000u), u) == 15, "-Inf");
        for (uint32_t b = 0; b <= 0x40D0u; b++) { /* every bf16 up to 6.5, both signs */
            const float v = float_of((b << 16) | ((b ^ u) & 1u) << 31);
            T_CHECK(gmm_f32_to_e2m1_random(v, u) == random_code((double)v, u), "%g at %u", (double)v, u);
        }
    }
    /* the mean is exact for multiples of step / 256, both signs */
    for (int i = 0; i < 2 * (1024 + 512 + 257); i++) {
        const int j = i / 2;
        const double a = j < 1024 ? j / 512.0 : j < 1536 ? 2.0 + (j - 1024) / 256.0 : 4.0 + (j - 1536) / 128.0;
        const double v = i & 1 ? -a : a;
        double sum = 0.0;
        for (unsigned u = 0; u < 256; u++) sum += (double)gmm_e2m1_to_f32(gmm_f32_to_e2m1_random((float)v, u));
        T_CHECK(sum / 256.0 == v, "mean %g of %g", sum / 256.0, v);
    }
    for (uint32_t b = 1; b <= 0x40C0u; b++) { /* between these it is low by at most step / 256 */
        const float v = float_of(b << 16);
        const double unit = v < 2.0f ? 0.5 : v < 4.0f ? 1.0 : 2.0;
        double sum = 0.0;
        for (unsigned u = 0; u < 256; u++) sum += (double)gmm_e2m1_to_f32(gmm_f32_to_e2m1_random(v, u));
        T_CHECK(sum / 256.0 <= (double)v && (double)v - sum / 256.0 <= unit / 256.0, "mean %g of %g", sum / 256.0,
                (double)v);
    }
}

/* --------------------------------------------------------------------------------------------- Delayed scaling --- */

static void delayed(int arg) { /* histories, margin, powers of two, Inf, overflow, one entry */
    float h[4] = { 5, 1, 2, 3 };
    float s;
    (void)arg;
    s = gmm_delayed_scale(h, 1, 4, 448.0f, 0, 0, 0.0f, 1.0f);
    T_CHECK(bits_of(s) == 0x42B33333u && h[0] == 0 && h[1] == 2 && h[2] == 3 && h[3] == 5, "largest of a history");
    T_CHECK(gmm_delayed_scale(h, 1, 4, 448.0f, 0, 0, 0.0f, s) == s && h[1] == 2 && h[2] == 3 && h[3] == 5, "zeros");
    h[0] = 5; h[1] = 1; h[2] = 2; h[3] = 3;
    T_CHECK(bits_of(gmm_delayed_scale(h, 1, 4, 448.0f, 2, 0, 0.0f, 1.0f)) == 0x41B33333u, "margin 2"); /* 22.4 */
    h[0] = INFINITY; h[1] = h[2] = h[3] = 1;
    s = 7.0f;
    for (int i = 0; i < 4; i++, h[0] = 1.0f)
        T_CHECK(gmm_delayed_scale(h, 1, 4, 448.0f, 0, 0, 0.0f, s) == s, "update %d", i);
    T_CHECK(gmm_delayed_scale(h, 1, 4, 448.0f, 0, 0, 0.0f, s) == 448.0f, "infinity has left the history");
    h[0] = 5; h[1] = 9;
    T_CHECK(gmm_delayed_scale(h, 1, 4, 448.0f, 0, 1, 0.0f, 1.0f) == 448.0f / 5.0f, "newest alone");
    h[0] = 1e-38f; h[1] = h[2] = h[3] = 0;
    T_CHECK(bits_of(gmm_delayed_scale(h, 1, 4, 57344.0f, 0, 0, 0.0f, 1.0f)) == 0x7F7FFFFFu, "overflow");
    h[0] = 2;
    T_CHECK(gmm_delayed_scale(h, 1, 1, 448.0f, 0, 0, 0.0f, 1.0f) == 224.0f && h[0] == 0, "history of one");
    h[0] = 2; h[1] = h[2] = h[3] = 0;
    T_CHECK(gmm_delayed_scale(h, 1, 4, 448.0f, 0, 0, 8.0f, 1.0f) == 56.0f && h[3] == 8, "reduced amax");
    h[0] = NAN;
    T_CHECK(gmm_delayed_scale(h, 1, 4, 448.0f, 0, 0, 0.0f, 3.0f) == 3.0f, "NaN keeps the scale");
}

/* Compared with a list that is searched and shifted as documented: largest and last amax, margins, maxima over ranks,
   and histories with strided entries. */
static void delayed_machine(int arg) {
    for (int way = 0; way < 4; way++) {
        const int len = arg, recent = way == 1, margin = way == 2 ? 3 : 0, stride = way == 3 ? 3 : 1;
        const float qmax = way & 1 ? 57344.0f : 448.0f;
        float h[48], list[16] = { 0 }, s = 1.0f, want = 1.0f;
        for (int i = 0; i < 48; i++) h[i] = i % stride ? 77.0f : 0.0f;
        for (int step = 0; step < 100000; step++) {
            const int what = (int)t_int(0, 19);
            const float seen = what < 2 || what == 5 ? 0.0f : what == 2 ? INFINITY : what == 3 ? NAN
                               : (float)ldexp(fabs(t_real()), (int)t_int(what == 4 ? -149 : -20, 20));
            const float ranks = what == 5 ? 3.0f : what < 5 || what > 8 ? 0.0f : seen * 2.0f;
            const float last = ranks > 0.0f ? ranks : seen;
            h[0] = seen;
            s = gmm_delayed_scale(h, stride, len, qmax, margin, recent, ranks, s);
            if (last != 0.0f) { /* a NaN too */
                float amax = isnan(last) ? INFINITY : last;
                for (int i = 1; i < len && !recent; i++) amax = fmaxf(amax, list[i]);
                for (int i = 1; i + 1 < len; i++) list[i] = list[i + 1];
                if (len > 1) list[len - 1] = last;
                if (isfinite(amax)) want = (float)ldexp((double)qmax, -margin) / amax;
                if (isinf(want)) want = float_of(0x7F7FFFFFu);
            }
            T_CHECK(s == want, "way %d step %d: %g instead of %g", way, step, (double)s, (double)want);
            T_CHECK(h[0] == 0.0f, "way %d step %d: %g stays to be counted again", way, step, (double)h[0]);
            for (int i = 1; i < len * stride; i++) {
                const float held = i % stride ? 77.0f : list[i / stride];
                T_CHECK(h[i] == held || (isnan(h[i]) && isnan(held)), "way %d step %d: history at %d", way, step, i);
            }
        }
    }
}

/* ----------------------------------------------------------------------------------------------------- Recipes --- */

static void recipes(int arg) {
    gmm_error e = GMM_ZERO;
    gmm_recipe r;
    (void)arg;
    for (int k = 0; k <= GMM_RECIPE_NVFP4; k++) {
        r = gmm_recipe_of((gmm_recipe_kind)k);
        T_CHECK(r.kind == (gmm_recipe_kind)k && gmm_recipe_validate(&r, &e) == GMM_OK, "recipe %d: %s", k, e.text);
    }
    r = gmm_recipe_of(GMM_RECIPE_FP8_DELAYED);
    T_CHECK(r.input.dtype == GMM_E4M3 && r.grad.dtype == GMM_E5M2 && r.grad.delayed && !r.input.pow2, "delayed");
    r = gmm_recipe_of(GMM_RECIPE_FP8_BLOCK);
    T_CHECK(r.input.scaling == GMM_SCALING_1X128 && r.weight.scaling == GMM_SCALING_128X128 && r.weight.pow2, "block");
    r = gmm_recipe_of(GMM_RECIPE_NVFP4);
    T_CHECK(r.weight.square && !r.weight.hadamard && r.grad.stochastic && r.input.hadamard == 0x1D7E8 &&
            !r.input.stochastic, "nvfp4");
#define REFUSED(kind_, change, want, needle) do { \
        r = gmm_recipe_of(kind_); \
        change; \
        T_CHECK(gmm_recipe_validate(&r, &e) == want && !strncmp(e.text, needle, strlen(needle)), "\"%s\"", e.text); \
    } while (0)
    REFUSED(GMM_RECIPE_FP8_BLOCK, r.input.scaling = GMM_SCALING_128X128, GMM_E_CONFIG, "input.scaling");
    REFUSED(GMM_RECIPE_FP8_BLOCK, r.grad.scaling = GMM_SCALING_128X128, GMM_E_CONFIG, "grad.scaling");
    REFUSED(GMM_RECIPE_NVFP4, r.grad.hadamard = 0, GMM_E_CONFIG, "grad.hadamard");
    REFUSED(GMM_RECIPE_NVFP4, r.grad.hadamard = GMM_HADAMARD | 1, GMM_E_CONFIG, "grad.hadamard");
    REFUSED(GMM_RECIPE_NVFP4, (r.weight.square = 0, r.weight.hadamard = GMM_HADAMARD), GMM_E_CONFIG, "weight.hadamard");
    REFUSED(GMM_RECIPE_NVFP4, r.weight.hadamard = GMM_HADAMARD, GMM_E_CONFIG, "weight.hadamard");
    REFUSED(GMM_RECIPE_NVFP4, r.input.hadamard = 1, GMM_E_CONFIG, "input.hadamard: 1 must");
    REFUSED(GMM_RECIPE_NVFP4, r.weight.stochastic = 1, GMM_E_CONFIG, "weight.stochastic");
    REFUSED(GMM_RECIPE_NVFP4, (r.weight.square = 0, r.weight.stochastic = 1), GMM_E_CONFIG,
            "weight.stochastic: 1 must be 0");
    REFUSED(GMM_RECIPE_NVFP4, r.input.stochastic = 1, GMM_E_CONFIG, "input.stochastic: 1 must be 0");
    REFUSED(GMM_RECIPE_NVFP4, r.weight.row_amax = 1, GMM_E_CONFIG, "weight.row_amax");
    REFUSED(GMM_RECIPE_NVFP4, r.weight.e4m3_256 = 1, GMM_E_CONFIG, "weight.e4m3_256");
    REFUSED(GMM_RECIPE_NVFP4,
            (r.grad.stochastic = r.input.hadamard = r.grad.hadamard = 0, r.grad.four_over_six = 1), GMM_E_CONFIG,
            "grad.four_over_six: 1 must");
    REFUSED(GMM_RECIPE_NVFP4, r.input.pow2 = 1, GMM_E_CONFIG, "input.pow2");
    REFUSED(GMM_RECIPE_MXFP8, r.input.square = 2, GMM_E_CONFIG, "input.square: 2 must");
    REFUSED(GMM_RECIPE_MXFP8, r.input.dtype = GMM_BF16, GMM_E_DTYPE, "input.scaling: dtype bf16");
    REFUSED(GMM_RECIPE_MXFP8, r.input.scaling = (gmm_scaling)44, GMM_E_DTYPE,
            "input.scaling: dtype e4m3 (4), scaling ? (44)");
    REFUSED(GMM_RECIPE_MXFP8, r.input.scaling = GMM_SCALING_TENSOR, GMM_E_CONFIG, "input.scaling");
    REFUSED(GMM_RECIPE_MXFP8, r.input = r.kind ? (gmm_format)GMM_ZERO : r.input, GMM_E_CONFIG, "grad.dtype");
    REFUSED(GMM_RECIPE_MXFP8, r.margin = 1, GMM_E_CONFIG, "margin");
    REFUSED(GMM_RECIPE_MXFP8, r.input.reserved[2] = 5, GMM_E_CONFIG, "input.reserved: 5 must");
    REFUSED(GMM_RECIPE_FP8_BLOCK, r.weight.order = GMM_SCALES_SWIZZLED, GMM_E_DTYPE, "weight.order");
    REFUSED(GMM_RECIPE_FP8_BLOCK, r.weight.eps = -1.5f, GMM_E_CONFIG, "weight.eps: -1.5 must");
    REFUSED(GMM_RECIPE_FP8_BLOCK, r.weight.delayed = 1, GMM_E_CONFIG, "weight.delayed");
    REFUSED(GMM_RECIPE_FP8_CURRENT, r.grad.delayed = 1, GMM_E_CONFIG, "grad.scaling");
    REFUSED(GMM_RECIPE_FP8_DELAYED, r.input.pow2 = 1, GMM_E_CONFIG, "input.pow2");
    REFUSED(GMM_RECIPE_FP8_DELAYED, r.history_length = -1, GMM_E_CONFIG, "history_length");
    REFUSED(GMM_RECIPE_FP8_DELAYED, r.most_recent = 2, GMM_E_CONFIG, "most_recent");
    REFUSED(GMM_RECIPE_FP8_DELAYED, r.margin = 64, GMM_E_CONFIG, "margin");
    REFUSED(GMM_RECIPE_FP8_DELAYED, r.struct_size = 100000, GMM_E_VERSION, "struct_size");
    REFUSED(GMM_RECIPE_FP8_DELAYED, r.struct_size = 4, GMM_E_ARG, "struct_size 4");
    REFUSED(GMM_RECIPE_FP8_DELAYED, r.weight.struct_size = 4, GMM_E_ARG, "weight.struct_size 4");
    REFUSED(GMM_RECIPE_FP8_DELAYED, r.weight.dtype = GMM_NONE, GMM_E_CONFIG, "weight.dtype");
    REFUSED(GMM_RECIPE_FP8_DELAYED, r.kind = (gmm_recipe_kind)9, GMM_E_CONFIG, "kind");
#undef REFUSED
    r = gmm_recipe_of(GMM_RECIPE_MXFP8);
    r.weight.dtype = GMM_E2M1; /* MXFP4 weights */
    T_CHECK(gmm_recipe_validate(&r, &e) == GMM_OK, "%s", e.text);
    r.input.struct_size = (uint32_t)sizeof r.input;
    T_CHECK(gmm_recipe_validate(&r, NULL) == GMM_OK && gmm_format_validate(&r.input, NULL) == GMM_OK, "sized format");
    r.weight.struct_size = (uint32_t)offsetof(gmm_format, hadamard);
    r.weight.hadamard = r.weight.row_amax = 5; /* which a format of this size does not have */
    T_CHECK(gmm_recipe_validate(&r, &e) == GMM_OK && gmm_format_validate(&r.weight, &e) == GMM_OK, "%s", e.text);
    T_CHECK(gmm_recipe_validate(NULL, &e) == GMM_E_NULL && gmm_format_validate(NULL, &e) == GMM_E_NULL, "NULL");
    T_CHECK(gmm_feature_align(GMM_SCALING_NONE) == 1 && gmm_feature_align(GMM_SCALING_128X128) == 16 &&
            gmm_feature_align(GMM_SCALING_MX32) == 32, "aligns");
}

/* ----------------------------------------------------------------------------------------------- Host quantizer --- */

/* Quantizes one line of values by the tile quantizer. */
typedef struct line_result { uint8_t code[GMM_TILE]; uint32_t scale[GMM_TILE_BLOCKS]; } line_result;
static line_result line(const gmm_format *f, const float *x, int n, float amax) {
    static float values[GMM_TILE * GMM_TILE];
    line_result r;
    gmm_tile t = GMM_ZERO;
    memset(&r, 0xEE, sizeof r);
    memset(values, 0, sizeof values);
    memcpy(values, x, (size_t)n * sizeof *x);
    t.format = f;
    t.source = GMM_BF16;
    t.lines = 1;
    t.along = n;
    t.x = values;
    t.amax = &amax;
    gmm_quantize_tile(&t, r.code, r.scale);
    return r;
}

/* Blocks whose codes and scales follow by hand: of MXFP8, FP8 of 128 elements, NVFP4 and its 4-over-6; with subnormals,
   NaN, Inf, zeros, and fewer elements than the block has. */
static void tile_vectors(int arg) {
    gmm_format f = gmm_recipe_of(GMM_RECIPE_MXFP8).input;
    float x[160] = { 0 };
    line_result r;
    (void)arg;
    for (int i = 0; i < 32; i++) x[i] = i == 0 ? 448.0f : 1.0f + (float)i / 16.0f;
    r = line(&f, x, 32, 0.0f);
    T_CHECK(r.scale[0] == 127 && r.scale[1] == 0xEEEEEEEEu, "MXFP8");
    for (int i = 0; i < 32; i++) T_CHECK(r.code[i] == gmm_f32_to_e4m3(x[i]), "element %d", i);
    for (int i = 0; i < 32; i++) x[i] = float_of(0x00010000u);
    r = line(&f, x, 32, 0.0f);
    T_CHECK(r.scale[0] == 0 && r.code[5] == 0x08, "%02x %02x", r.scale[0], r.code[5]);
    T_CHECK((double)gmm_e4m3_to_f32(0x08) * (double)gmm_e8m0_to_f32(0) == (double)x[5], "exact");
    for (int i = 0; i < 32; i++) x[i] = i == 7 ? NAN : 1.0f;
    r = line(&f, x, 32, 0.0f);
    T_CHECK(r.scale[0] == 0x77 && r.code[7] == 0x7F && r.code[6] == 0x78, "NaN in MXFP8");
    for (int i = 0; i < 32; i++) x[i] = i == 7 ? -INFINITY : 1.0f; /* Inf saturates, the others become 0 */
    r = line(&f, x, 32, 0.0f);
    T_CHECK(r.scale[0] == 254 && r.code[7] == 0xFE && r.code[6] == 0x00, "Inf in MXFP8");

    f = gmm_recipe_of(GMM_RECIPE_FP8_BLOCK).input;
    x[0] = 3.0f;
    x[1] = INFINITY;
    r = line(&f, x, 2, 0.0f);
    T_CHECK(r.scale[0] == 0x3F800000u && r.code[0] == gmm_f32_to_e4m3(3.0f) && r.code[1] == 0x7E, "Inf in a block");
    x[1] = 1.0f;
    r = line(&f, x, 2, 0.0f); /* two elements of a ragged block */
    T_CHECK(r.scale[0] == 0x3C000000u && r.code[0] == gmm_f32_to_e4m3(3.0f * 128.0f), "ragged block");
    x[0] = x[1] = 0.0f;
    r = line(&f, x, 2, 0.0f);
    T_CHECK(r.scale[0] == 0x3F800000u && r.code[0] == 0, "zero block");

    memset(&f, 0, sizeof f);
    f.dtype = GMM_E2M1;
    f.scaling = GMM_SCALING_NV16;
    memset(x, 0, sizeof x);
    r = line(&f, x, 16, 1.0f);
    T_CHECK(r.scale[0] == 0 && r.code[3] == 0, "zero block of NVFP4");
    x[0] = 1e-30f;
    x[1] = -1e-30f;
    r = line(&f, x, 16, 1.0f);
    T_CHECK(r.scale[0] == 0 && r.code[0] == 7 && r.code[1] == 15 && r.code[2] == 0, "scale 0 of NVFP4");

    f.four_over_six = 1;
    f.e4m3_256 = 1;
    memset(x, 0, sizeof x);
    x[0] = 6.0f;
    r = line(&f, x, 16, 1536.0f);
    T_CHECK(r.scale[0] == 0x38 && r.code[0] == 7, "[6] takes %02x", r.scale[0]);
    x[1] = x[2] = x[3] = 4.5f;
    r = line(&f, x, 16, 1536.0f);
    T_CHECK(r.scale[0] == 0x3C && r.code[0] == 6 && r.code[1] == 5 && r.code[3] == 5, "[6, 4.5 ...]");
    x[1] = 4.0f; x[2] = 3.0f; x[3] = 2.0f; x[4] = 1.0f;
    r = line(&f, x, 16, 1536.0f);
    T_CHECK(r.scale[0] == 0x38, "[6, 4, 3, 2, 1]");
    memset(x, 0, sizeof x);
    x[0] = 12.0f; x[1] = x[2] = 9.0f;
    r = line(&f, x, 16, 1536.0f);
    T_CHECK(r.scale[0] == 0x44, "[12, 9, 9]");
}

/* 4-over-6 compared with both choices, computed in double. */
static double step(float base, int which) { return (double)(float)((double)base * (which ? 1.5 : 1.0)); }
static void four_over_six(int arg) {
    gmm_format f = GMM_ZERO;
    int fours = 0;
    f.dtype = GMM_E2M1;
    f.scaling = GMM_SCALING_NV16;
    f.four_over_six = arg;
    f.e4m3_256 = 1;
    for (int n = 0; n < 20000; n++) {
        float x[16], amax = 0.0f;
        double error[2] = { 0.0, 0.0 };
        const float global = 1536.0f; /* S = 1 */
        line_result r;
        int which;
        for (int i = 0; i < 16; i++) {
            x[i] = (float)ref_round(GMM_BF16, t_real() * ldexp(1.0, (int)t_int(0, 8)));
            amax = fmaxf(amax, fabsf(x[i]));
        }
        r = line(&f, x, 16, global);
        for (which = 0; which < 2; which++) {
            const float sf = (float)value_of(&formats[0], nearest_of(&formats[0], step(amax / 6.0f, which)));
            for (int i = 0; i < 16; i++) {
                const double q = value_of(&formats[2], nearest_of(&formats[2], (double)(x[i] * (1.0f / sf))));
                const double miss = q * (double)sf - (double)x[i];
                error[which] += arg == 2 ? miss * miss : fabs(miss);
            }
        }
        /* nearly a tie, decided by the order of additions */
        if (fabs(error[0] - error[1]) < 1e-4 * (error[0] + error[1])) continue;
        which = error[1] < error[0];
        fours += which;
        T_CHECK(r.scale[0] == (uint32_t)nearest_of(&formats[0], step(amax / 6.0f, which)),
                "block %d: scale %02x, errors %g and %g", n, r.scale[0], error[0], error[1]);
    }
    T_CHECK(fours > 1000, "only %d blocks chose 4", fours);
}

/* The same bit for bit, by the fp32 steps of the rule, where both choices have nearly the same error: the second value
   is halfway between its two results. `order` 1: the two factors of a value are multiplied first, as other libraries
   might do. */
static float four_over_six_error(const float x[16], float sf, float amax, float most, int squared, int order) {
    const float S = 6.0f * most / amax, Sd = 1.0f / S, enc = 1.0f / (sf * Sd);
    float sum = 0.0f;
    for (int i = 0; i < 16; i++) {
        const float q = (float)value_of(&formats[2], nearest_of(&formats[2], (double)(x[i] * enc)));
        const float whole = order ? q * (sf * amax) : q * sf * amax, miss = whole / (6.0f * most) - x[i];
        sum += squared ? miss * miss : fabsf(miss);
    }
    return sum;
}
static void four_over_six_bits(int arg) {
    gmm_format f = GMM_ZERO;
    int fours = 0, sixes = 0, differ = 0;
    f.dtype = GMM_E2M1;
    f.scaling = GMM_SCALING_NV16;
    f.four_over_six = 1 + arg % 2;
    f.e4m3_256 = arg / 2;
    for (int n = 0; n < 40000; n++) {
        const float most = arg / 2 ? 256.0f : 448.0f, global = (float)ldexp(1.0 + fabs(t_real()), (int)t_int(-3, 9));
        const float S = 6.0f * most / global;
        float x[16] = { 0 }, base, sf[2], error[2][2];
        x[0] = global * (float)ldexp(0.5 + fabs(t_real()) / 2.0, -(int)t_int(0, 5));
        base = x[0] / 6.0f * S;
        for (int k = 0; k < 2; k++)
            sf[k] = (float)value_of(&formats[0], nearest_of(&formats[0], (double)(k ? base * 1.5f : base)));
        x[1] = (float)((2.0 * (double)sf[0] + 1.5 * (double)sf[1]) / 2.0 * (double)global / (6.0 * (double)most));
        for (int order = 0; order < 2; order++)
            for (int k = 0; k < 2; k++)
                error[order][k] = four_over_six_error(x, sf[k], global, most, arg % 2, order);
        {
            const int four = error[0][1] < error[0][0];
            const line_result r = line(&f, x, 16, global);
            T_CHECK(r.scale[0] == gmm_f32_to_e4m3(sf[four]), "block %d: scale %02x, errors %a and %a", n, r.scale[0],
                    (double)error[0][0], (double)error[0][1]);
            fours += four;
            sixes += !four;
            differ += four != (error[1][1] < error[1][0]);
        }
    }
    T_CHECK(fours > 1000 && sixes > 1000 && differ > 10, "%d fours, %d sixes, %d by the order", fours, sixes, differ);
}

/* Every format at every width: codes and scales by the definitions, in double where a step rounds once. */
static void tile_properties(int arg) {
    const gmm_recipe_kind kind = (gmm_recipe_kind)(arg / 3 + 1);
    const gmm_recipe r = gmm_recipe_of(kind);
    gmm_format f = arg % 3 == 0 ? r.input : arg % 3 == 1 ? r.weight : r.grad;
    enum { L = 37, A = 101 };
    static float x[GMM_TILE * GMM_TILE];
    static uint8_t code[GMM_TILE * GMM_TILE], other[GMM_TILE * GMM_TILE];
    uint32_t scale[GMM_TILE * GMM_TILE_BLOCKS], scale2[GMM_TILE * GMM_TILE_BLOCKS];
    float amax = 0.0f;
    gmm_tile t = GMM_ZERO;
    const int width = gmm_block_along(f.scaling) ? gmm_block_along(f.scaling) : 128;
    memset(x, 0, sizeof x);
    for (int l = 0; l < L; l++)
        for (int i = 0; i < A; i++) {
            x[l * GMM_TILE + i] = (float)ref_round(GMM_BF16, t_real() * ldexp(1.0, (int)t_int(-6, 6)));
            amax = fmaxf(amax, fabsf(x[l * GMM_TILE + i]));
        }
    t.format = &f;
    t.source = GMM_BF16;
    t.lines = L;
    t.along = A;
    t.x = x;
    t.amax = &amax;
    t.scale = 3.5f;
    t.blocks_per_line = GMM_TILE_BLOCKS;
    gmm_quantize_tile(&t, code, scale);
    for (int l = 0; l < L; l++)
        for (int i = 0; i < A; i++) {
            const double v = x[l * GMM_TILE + i], back = (double)gmm_decode_small(f.dtype, code[l * GMM_TILE + i]);
            const uint32_t s = scale[l * GMM_TILE_BLOCKS + i / width];
            const double unit = f.scaling == GMM_SCALING_MX32 ? (double)gmm_e8m0_to_f32((uint8_t)s)
                                : f.scaling == GMM_SCALING_NV16 ? (double)gmm_nv_decode((uint8_t)s, amax, 448.0f)
                                                                : (double)float_of(s);
            /* half a unit in the last place of the format, a whole one with stochastic rounding; E2M1's largest step is
               2 of 6 */
            const double relative = f.dtype == GMM_E4M3 ? 0x1p-4 : f.dtype == GMM_E5M2 ? 0x1p-3 : 0.25;
            const double tiny = f.dtype == GMM_E4M3 ? 0x1p-10 : f.dtype == GMM_E5M2 ? 0x1p-17 : 0.25;
            const double bound = fmax(relative * fabs(v), tiny * unit) * (f.stochastic ? 2.01 : 1.0);
            if (f.delayed && fabs(v) * 3.5 > 448.0 && f.dtype == GMM_E4M3) continue; /* saturates */
            T_CHECK(fabs(back * unit - v) <= bound * (1.0 + 0x1p-20 + 0x1p-3 * (f.scaling == GMM_SCALING_NV16)),
                    "line %d element %d: %g comes back as %g, unit %g", l, i, v, back * unit, unit);
        }
    /* blocks are independent: a changed line changes only its own square */
    if (gmm_block_along(f.scaling) && f.scaling != GMM_SCALING_128X128) {
        const int height = f.square ? width : 1, hit = 20 / height;
        memcpy(other, code, sizeof code);
        memcpy(scale2, scale, sizeof scale);
        x[20 * GMM_TILE + 40] = amax;
        gmm_quantize_tile(&t, code, scale);
        for (int l = 0; l < L; l++)
            for (int i = 0; i < A; i++)
                if (l / height != hit || i / width != 40 / width)
                    T_CHECK(code[l * GMM_TILE + i] == other[l * GMM_TILE + i] &&
                            scale[l * GMM_TILE_BLOCKS + i / width] == scale2[l * GMM_TILE_BLOCKS + i / width],
                            "line %d element %d changed", l, i);
    }
    /* -x gives the same codes with the opposite sign (random bits do not depend on values) */
    for (int i = 0; i < GMM_TILE * GMM_TILE; i++) x[i] = -x[i];
    gmm_quantize_tile(&t, other, scale2);
    for (int l = 0; l < L; l++)
        for (int i = 0; i < A; i++)
            T_CHECK((code[l * GMM_TILE + i] ^ other[l * GMM_TILE + i]) == (f.dtype == GMM_E2M1 ? 8 : 0x80) ||
                    x[l * GMM_TILE + i] == 0.0f, "sign of line %d element %d", l, i);
}

/* Formats whose scales are powers of two. */
static gmm_format power_format(int i) {
    static const struct { gmm_dtype dtype; gmm_scaling scaling; int square; } rows[] = {
        { GMM_E4M3, GMM_SCALING_MX32, 0 }, { GMM_E5M2, GMM_SCALING_MX32, 0 }, { GMM_E2M1, GMM_SCALING_MX32, 0 },
        { GMM_E4M3, GMM_SCALING_MX32, 1 }, { GMM_E4M3, GMM_SCALING_1X128, 0 }, { GMM_E4M3, GMM_SCALING_128X128, 0 },
        { GMM_E4M3, GMM_SCALING_TENSOR, 0 }, { GMM_E5M2, GMM_SCALING_ROW, 0 } };
    gmm_format f = GMM_ZERO;
    f.dtype = rows[i].dtype;
    f.scaling = rows[i].scaling;
    f.square = rows[i].square;
    f.pow2 = f.scaling != GMM_SCALING_MX32;
    return f;
}
enum { POWERS = 8 };

static float power_unit(const gmm_format *f, uint32_t scale) {
    return f->scaling == GMM_SCALING_MX32 ? gmm_e8m0_to_f32((uint8_t)scale) : float_of(scale);
}

/* Quantizes a tile of fp32 values by its own amaxes, and decodes it. */
static void power_tile(const gmm_format *f, const float *x, uint8_t *code, uint32_t *scale, float *back) {
    const int width = gmm_block_along(f->scaling) ? gmm_block_along(f->scaling) : GMM_TILE;
    float amax[GMM_TILE] = { 0 };
    gmm_tile t = GMM_ZERO;
    for (int i = 0; i < GMM_TILE * GMM_TILE; i++) {
        float *a = &amax[f->scaling == GMM_SCALING_ROW ? i / GMM_TILE : 0];
        *a = fmaxf(*a, fabsf(x[i]));
    }
    t.format = f;
    t.source = GMM_F32;
    t.lines = t.along = GMM_TILE;
    t.x = x;
    t.amax = amax;
    t.amax_per_line = f->scaling == GMM_SCALING_ROW;
    gmm_quantize_tile(&t, code, scale);
    for (int i = 0; i < GMM_TILE * GMM_TILE; i++)
        back[i] = gmm_decode_small(f->dtype, code[i]) *
                  power_unit(f, scale[i / GMM_TILE * GMM_TILE_BLOCKS + i % GMM_TILE / width]);
}

/* Quantizing the decoded values again gives the same values, by codes that may be one power of two larger. Values
   times a power of two shift the scales and keep the codes; values exchanged within a block exchange their codes. */
static void powers(int arg) {
    static float x[GMM_TILE * GMM_TILE], y[GMM_TILE * GMM_TILE], back[GMM_TILE * GMM_TILE], again[GMM_TILE * GMM_TILE];
    static uint8_t code[GMM_TILE * GMM_TILE], other[GMM_TILE * GMM_TILE];
    static uint32_t scale[GMM_TILE * GMM_TILE_BLOCKS], scale2[GMM_TILE * GMM_TILE_BLOCKS];
    const gmm_format f = power_format(arg);
    const int width = gmm_block_along(f.scaling) ? gmm_block_along(f.scaling) : GMM_TILE, per_line = GMM_TILE / width;
    int64_t shifted = 0;
    for (int n = 0; n < 100; n++) {
        const int spread = n % 4 * 4, shift = (int)t_int(-20, 20);
        for (int i = 0; i < GMM_TILE * GMM_TILE; i++)
            x[i] = (float)ref_round(GMM_BF16, t_real() * ldexp(1.0, (int)t_int(-spread, spread)));
        /* an amax that rounds down to half of the largest value */
        for (int i = 0; i < GMM_TILE * GMM_TILE && n % 8 == 0; i++)
            x[i] = i % 16 == 0 ? 225.0f / 256.0f : x[i] * 0.5f;
        power_tile(&f, x, code, scale, back);
        power_tile(&f, back, other, scale2, again);
        for (int i = 0; i < GMM_TILE * GMM_TILE; i++) {
            T_CHECK(again[i] == back[i], "%g of %g comes back as %g", (double)back[i], (double)x[i],
                    (double)again[i]);
            shifted += other[i] != code[i];
        }
        for (int i = 0; i < GMM_TILE * GMM_TILE; i++) y[i] = (float)ldexp((double)x[i], shift);
        power_tile(&f, y, other, scale2, again);
        T_CHECK(!memcmp(code, other, sizeof code), "codes of values times 2^%d", shift);
        for (int l = 0; l < GMM_TILE; l++)
            for (int b = 0; b < per_line; b++)
                T_CHECK((double)power_unit(&f, scale2[l * GMM_TILE_BLOCKS + b]) ==
                        ldexp((double)power_unit(&f, scale[l * GMM_TILE_BLOCKS + b]), shift), "scales of values times "
                        "2^%d: line %d block %d", shift, l, b);
        for (int i = 0; i < GMM_TILE * GMM_TILE; i++) y[i] = x[i / width * width + (i % width * 7 + n) % width];
        power_tile(&f, y, other, scale2, again);
        for (int i = 0; i < GMM_TILE * GMM_TILE; i++)
            T_CHECK(other[i] == code[i / width * width + (i % width * 7 + n) % width], "values that changed places");
    }
    T_CHECK(shifted > 0, "no code was shifted, so the harder case was not met");
}

void tests_quant(void) {
    for (int i = 0; i < 3; i++) t_add_host(decode_all, i, "quant %s all codes", formats[i].name);
    for (int i = 0; i < 3; i++) t_add_host(encode_halves, i, "quant %s of all bf16 and fp16", formats[i].name);
    for (int i = 0; i < 3; i++) t_add_host(encode_floats, i, "quant %s of fp32", formats[i].name);
    t_add_host(e8m0, 0, "quant e8m0");
    t_add_host(vectors_codecs, 0, "quant codecs of known values");
    t_add_host(packed_turn, 0, "quant packed codes turned twice");
    t_add_host(scales_mx, 0, "quant mx scales");
    for (int i = 0; i < 3; i++) t_add_host(scales_mx_floats, i, "quant mx scales of fp32, %s", formats[i].name);
    t_add_host(scales_tensor, 0, "quant fp32 scales");
    t_add_host(scales_nv, 0, "quant nvfp4 scales");
    t_add_host(hadamard, 0, "quant hadamard");
    t_add_host(philox, 0, "quant philox, draws");
    t_add_host(stochastic, 0, "quant stochastic rounding");
    t_add_host(delayed, 0, "quant delayed scaling");
    for (int i = 1; i <= 16; i *= 4) t_add_host(delayed_machine, i, "quant delayed scaling, history of %d", i);
    t_add_host(recipes, 0, "quant recipes and their rules");
    t_add_host(tile_vectors, 0, "quant tiles of known values");
    for (int i = 0; i < POWERS; i++)
        t_add_host(powers, i, "quant powers of two %s %s%s", gmm_dtype_name(power_format(i).dtype),
                   gmm_scaling_name(power_format(i).scaling), power_format(i).square ? " square" : "");
    t_add_host(four_over_six, 1, "quant four over six, absolute error");
    t_add_host(four_over_six, 2, "quant four over six, squared error");
    for (int i = 0; i < 4; i++)
        t_add_host(four_over_six_bits, i, "quant four over six to the bit, %s error, %s",
                   i % 2 ? "squared" : "absolute", i / 2 ? "256" : "448");
    for (int i = 0; i < 15; i++) {
        static const char *const kinds[] = { "delayed", "current", "block", "mxfp8", "nvfp4" };
        static const char *const roles[] = { "input", "weight", "grad" };
        t_add_host(tile_properties, i, "quant tile %s %s", kinds[i / 3], roles[i % 3]);
    }
}
