/* test_codecs.c - bf16 and fp16 codecs, names of enums */
#include "test.h"

#include <math.h>
#include <string.h>

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

/* All patterns of one format: decoding is exact, and encoding gives the pattern back (0x7FFF for any NaN). */
static void patterns(int arg) {
    const int exponent = arg ? 5 : 8, mantissa = arg ? 10 : 7;
    for (uint32_t u = 0; u < 0x10000u; u++) {
        const float v = arg ? gmm_f16_to_f32((uint16_t)u) : gmm_bf16_to_f32((uint16_t)u);
        const double want = ref_decode(u, exponent, mantissa);
        const uint16_t back = arg ? gmm_f32_to_f16(v) : gmm_f32_to_bf16(v);
        T_CHECK(isnan(want) ? isnan(v) : (double)v == want && !signbit(v) == !signbit(want),
                "%04x decodes to %g, not %g", u, (double)v, want);
        T_CHECK(back == (isnan(want) ? 0x7FFFu : u), "%04x comes back as %04x", u, back);
    }
}

static void encode_one(int half, uint32_t u) {
    const float v = float_of(u);
    const uint32_t want = half ? ref_encode((double)v, 5, 10) : ref_encode((double)v, 8, 7);
    const uint32_t got = half ? gmm_f32_to_f16(v) : gmm_f32_to_bf16(v);
    T_CHECK(got == want, "%08x (%g) becomes %04x instead of %04x", u, (double)v, got, want);
}

/* fp32 to the format: every value, every midpoint between neighbours and the fp32 values beside them, then samples of
   all bits, subnormals, Inf and NaN. */
static void encode(int arg) {
    for (uint32_t u = 0; u < 0x10000u; u++) {
        const double low = ref_decode(u, arg ? 5 : 8, arg ? 10 : 7);
        const double high = ref_decode(u + 1u, arg ? 5 : 8, arg ? 10 : 7);
        uint32_t at;
        if (isnan(low) || isnan(high) || isinf(low) || isinf(high) || (u & 0x7FFFu) == 0x7FFFu) continue;
        at = bits_of((float)((low + high) / 2.0));
        for (uint32_t d = 0; d < 5; d++) {
            encode_one(arg, at - 2u + d);
            encode_one(arg, bits_of((float)low) - 2u + d);
        }
    }
    /* the last midpoint, where overflow to infinity begins */
    for (uint32_t d = 0; d < 9; d++) {
        encode_one(arg, (arg ? 0x477FF000u : 0x7F7F8000u) - 4u + d);
        encode_one(arg, (arg ? 0xC77FF000u : 0xFF7F8000u) - 4u + d);
    }
    for (int i = 0; i < 3000000; i++) encode_one(arg, (uint32_t)t_rand());
    for (int i = 0; i < 200000; i++) { /* the fp32 subnormals, and the range of fp16's */
        encode_one(arg, (uint32_t)t_rand() & 0x807FFFFFu);
        encode_one(arg, ((uint32_t)t_rand() & 0x87FFFFFFu) | 0x30000000u);
    }
    for (uint32_t i = 0; i < 0x800000u; i += 101) { /* Inf and NaN of either sign */
        encode_one(arg, 0x7F800000u + i);
        encode_one(arg, 0xFF800000u + i);
    }
    encode_one(arg, 0x7FFFFFFFu);
    encode_one(arg, 0xFFFFFFFFu);
    encode_one(arg, 0x7F800001u);
}

static void named_values(int arg) {
    (void)arg;
    T_CHECK(gmm_f32_to_bf16(1.5f) == 0x3FC0u && gmm_f32_to_f16(1.5f) == 0x3E00u, "1.5");
    T_CHECK(gmm_f32_to_bf16(-0.0f) == 0x8000u && gmm_f32_to_f16(-0.0f) == 0x8000u, "-0");
    T_CHECK(gmm_f32_to_f16(65504.0f) == 0x7BFFu && gmm_f32_to_f16(65519.996f) == 0x7BFFu, "largest fp16");
    T_CHECK(gmm_f32_to_f16(65520.0f) == 0x7C00u, "fp16 overflow");
    T_CHECK(gmm_f32_to_f16(0x1p-24f) == 1u && gmm_f32_to_f16(0x1p-25f) == 0u && gmm_f32_to_f16(0x1.000002p-25f) == 1u,
            "smallest fp16");
    T_CHECK(gmm_f32_to_bf16(0x1.01p0f) == 0x3F80u && gmm_f32_to_bf16(0x1.03p0f) == 0x3F82u, "ties to even");
    T_CHECK(gmm_f32_bits(1.0f) == 0x3F800000u && gmm_f32_from_bits(0xC0000000u) == -2.0f, "bits");
}

/* gmm_load and gmm_store agree with the codecs at any index. */
static void load_store(int arg) {
    const gmm_dtype dtype = arg == 0 ? GMM_F32 : arg == 1 ? GMM_F16 : GMM_BF16;
    unsigned char memory[64 * 4], want[64 * 4];
    for (int i = 0; i < 64; i++) {
        const double v = t_real() * 100.0;
        gmm_store(dtype, memory, i, (float)v);
        ref_store(dtype, want, i, (double)(float)v);
        T_CHECK((double)gmm_load(dtype, memory, i) == ref_round(dtype, (double)(float)v), "element %d", i);
    }
    t_same("stored", memory, want, (size_t)(64 * ref_bytes(dtype)));
}

static void names(int arg) {
    (void)arg;
#define X(name, value, text, bits) \
    T_CHECK(name == value && gmm_dtype_bits(name) == bits && !strcmp(gmm_dtype_name(name), #text), #name);
    GMM_DTYPE_LIST(X)
#undef X
#define X(name, value, text, dtype, rows, cols) \
    T_CHECK(name == value && !strcmp(gmm_scaling_name(name), #text), #name);
    GMM_SCALING_LIST(X)
#undef X
#define X(name, value, text) \
    T_CHECK(name == value && !strcmp(gmm_status_name(name), #name) && strlen(gmm_status_string(name)) > 5, #name);
    GMM_STATUS_LIST(X)
#undef X
#define X(name, text) T_CHECK(!strcmp(gmm_op_name(name), #text), #name);
    GMM_OP_LIST(X)
#undef X
#define X(name, value, text) T_CHECK(name == value && !strcmp(gmm_engine_name(name), #text), #name);
    GMM_ENGINE_LIST(X)
#undef X
#define X(name, value, text) T_CHECK(name == value && !strcmp(gmm_recipe_name(name), text), #name);
    GMM_RECIPE_LIST(X)
#undef X
#define X(name, value, text, status) \
    T_CHECK(name == value && !strcmp(gmm_ckpt_reason_name(name), #text), #name);
    GMM_CKPT_REASON_LIST(X)
#undef X
    T_CHECK(gmm_dtype_bits((gmm_dtype)99) == 0 && !strcmp(gmm_dtype_name((gmm_dtype)99), "?"), "unknown dtype");
    T_CHECK(!strcmp(gmm_scaling_name((gmm_scaling)99), "?"), "unknown scaling");
    T_CHECK(!strcmp(gmm_status_name((gmm_status)99), "?") && gmm_status_string((gmm_status)99)[0], "unknown status");
    T_CHECK(!strcmp(gmm_op_name(GMM_OP_COUNT), "?") && !strcmp(gmm_engine_name((gmm_engine)99), "?"),
            "unknown op, engine");
    T_CHECK(!strcmp(gmm_recipe_name((gmm_recipe_kind)99), "?") && !strcmp(gmm_recipe_name((gmm_recipe_kind)-1), "?"),
            "unknown recipe");
    T_CHECK(!strcmp(gmm_ckpt_reason_name((gmm_ckpt_reason)99), "?"), "unknown reason");
    /* programs take these on their command lines and write them to files */
    T_CHECK(!strcmp(gmm_recipe_name(GMM_RECIPE_FP8_BLOCK), "fp8-block"), "fp8-block");
    T_CHECK(!strcmp(gmm_ckpt_reason_name(GMM_CKPT_DUPLICATE_KEY), "duplicate_key"), "duplicate_key");
    T_CHECK(sizeof(((gmm_error *)0)->text) + sizeof(gmm_status) == sizeof(gmm_error), "gmm_error");
}

void tests_codecs(void) {
    t_add_host(patterns, 0, "codecs bf16 all 65536 patterns");
    t_add_host(patterns, 1, "codecs fp16 all 65536 patterns");
    t_add_host(encode, 0, "codecs fp32 to bf16");
    t_add_host(encode, 1, "codecs fp32 to fp16");
    t_add_host(named_values, 0, "codecs named values");
    for (int i = 0; i < 3; i++)
        t_add_host(load_store, i, "codecs gmm_load gmm_store %s", i == 0 ? "f32" : i == 1 ? "f16" : "bf16");
    t_add_host(names, 0, "codecs names of enums");
}
