/* -------------------------------------------------------------------------------------------------- 5 Codecs --- */

/* Bits of floats. All codecs below are integer arithmetic: equal on every host, device and set of compiler flags. */
GMM__HD uint32_t gmm_f32_bits(float x) {
    union { float f; uint32_t u; } v;
    v.f = x;
    return v.u;
}
GMM__HD float gmm_f32_from_bits(uint32_t u) {
    union { uint32_t u; float f; } v;
    v.u = u;
    return v.f;
}

/* BF16: round to nearest even; every NaN becomes 0x7FFF. */
GMM__HD uint16_t gmm_f32_to_bf16(float x) {
    uint32_t u = gmm_f32_bits(x);
    uint32_t r = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : r);
}
GMM__HD float gmm_bf16_to_f32(uint16_t b) { return gmm_f32_from_bits((uint32_t)b << 16); }

/* FP16: round to nearest even with gradual underflow; overflow gives infinity; every NaN becomes 0x7FFF. */
GMM__HD uint16_t gmm_f32_to_f16(float x) {
    uint32_t u = gmm_f32_bits(x), a = u & 0x7FFFFFFFu, sign = (u >> 16) & 0x8000u;
    uint32_t exponent = a >> 23;
    uint32_t normal = a - 0x38000000u; /* rebias by 112 */
    uint32_t shift = exponent < 113u ? 113u - exponent : 0u;
    uint32_t significand = (a & 0x7FFFFFu) | (exponent ? 0x800000u : 0u);
    uint32_t drop = 13u + (shift > 12u ? 12u : shift);
    uint32_t small_q = significand >> drop, rem = significand & ((1u << drop) - 1u), half = 1u << (drop - 1u);
    uint32_t small_r = shift > 12u ? 0u : small_q + (uint32_t)(rem > half || (rem == half && (small_q & 1u)));
    uint32_t big_r = (normal + 0xFFFu + ((normal >> 13) & 1u)) >> 13;
    uint32_t q = shift ? small_r : (big_r > 0x7C00u ? 0x7C00u : big_r);
    return (uint16_t)(a > 0x7F800000u ? 0x7FFFu : sign | q);
}
GMM__HD float gmm_f16_to_f32(uint16_t h) {
    uint32_t sign = ((uint32_t)h & 0x8000u) << 16, a = (uint32_t)h & 0x7FFFu;
    /* masks instead of branches, so that loops vectorise */
    uint32_t special = 0u - (uint32_t)(a >= 0x7C00u), subnormal = 0u - (uint32_t)(a < 0x0400u);
    uint32_t nonzero = 0u - (uint32_t)(a != 0u);
    uint32_t wide = (a << 13) + 0x38000000u + (special & 0x38000000u);
    /* a subnormal half is a * 2^-24: exact in fp32, and built from an integer so that no flag flushes it */
    uint32_t scaled = gmm_f32_bits((float)(int32_t)a) - (24u << 23);
    return gmm_f32_from_bits(sign | (wide & ~subnormal) | (scaled & subnormal & nonzero));
}

/* The small formats: E4M3 and E5M2 as bytes, E2M1 as a nibble (0 to 15), E8M0 as a byte. fp32 is rounded to nearest
   even and saturates at the largest finite value; a NaN becomes 0x7F (E2M1, which has none: +6) and loses its sign.
   The _nosat forms give NaN (E4M3) or infinity (E5M2) where the others saturate.
   E8M0 holds powers of two from 2^-127 to 2^127: the smallest one >= |x|. What exceeds 2^127 saturates to it, or with
   _nosat becomes NaN, 0xFF, as a NaN does. */
GMM__HD uint32_t gmm__encode_small(float x, uint32_t mantissa, uint32_t min_exponent, uint32_t sign_bit,
                                   uint32_t largest, uint32_t overflow, uint32_t nan) {
    const uint32_t u = gmm_f32_bits(x), a = u & 0x7FFFFFFFu;
    const uint32_t e = a >> 23; /* min_exponent: that of the smallest normal value */
    const uint32_t denormal_shift = e < min_exponent ? min_exponent - e : 0u;
    const uint32_t exponent = e < min_exponent ? 0u : e - min_exponent;
    const uint32_t shift = 23u - mantissa + denormal_shift, drop = shift > 25u ? 25u : shift;
    const uint32_t significand = (a & 0x7FFFFFu) | (e ? 0x800000u : 0u);
    const uint32_t rem = significand & ((1u << drop) - 1u), half = 1u << (drop - 1u);
    uint32_t q = significand >> drop;
    q += (uint32_t)(rem > half || (rem == half && (q & 1u)));
    q += exponent << mantissa; /* a carry out of the mantissa has raised the exponent */
    q = q > largest ? overflow : q;
    return a > 0x7F800000u ? nan : (u >> 31) * sign_bit | q;
}
GMM__HD uint8_t gmm_f32_to_e4m3(float x) {
    return (uint8_t)gmm__encode_small(x, 3u, 121u, 0x80u, 0x7Eu, 0x7Eu, 0x7Fu);
}
GMM__HD uint8_t gmm_f32_to_e4m3_nosat(float x) {
    return (uint8_t)gmm__encode_small(x, 3u, 121u, 0x80u, 0x7Eu, 0x7Fu, 0x7Fu);
}
GMM__HD uint8_t gmm_f32_to_e5m2(float x) {
    return (uint8_t)gmm__encode_small(x, 2u, 113u, 0x80u, 0x7Bu, 0x7Bu, 0x7Fu);
}
GMM__HD uint8_t gmm_f32_to_e5m2_nosat(float x) {
    return (uint8_t)gmm__encode_small(x, 2u, 113u, 0x80u, 0x7Bu, 0x7Cu, 0x7Fu);
}
GMM__HD uint8_t gmm_f32_to_e2m1(float x) { return (uint8_t)gmm__encode_small(x, 1u, 127u, 8u, 7u, 7u, 7u); }

GMM__HD float gmm_e4m3_to_f32(uint8_t code) {
    const uint32_t a = code & 0x7Fu, sign = (code & 0x80u) << 24;
    /* a subnormal is a * 2^-9: exact, and built from an integer so that no flag flushes it */
    const uint32_t tiny = a ? gmm_f32_bits((float)(int32_t)a) - (9u << 23) : 0u;
    return gmm_f32_from_bits(sign | (a == 0x7Fu ? 0x7FFFFFFFu : a < 8u ? tiny : (a << 20) + (120u << 23)));
}
GMM__HD float gmm_e5m2_to_f32(uint8_t code) { return gmm_f16_to_f32((uint16_t)(code << 8)); }
GMM__HD float gmm_e2m1_to_f32(uint8_t code) {
    const uint32_t a = code & 7u, sign = (code & 8u) << 28;
    return gmm_f32_from_bits(sign | (a == 0u ? 0u : a == 1u ? 0x3F000000u : (a << 22) + (126u << 23)));
}
/* Element of E4M3, E5M2 or E2M1 from its code, and back. */
GMM__HD float gmm_decode_small(gmm_dtype dtype, uint8_t code) {
    return dtype == GMM_E4M3 ? gmm_e4m3_to_f32(code) : dtype == GMM_E5M2 ? gmm_e5m2_to_f32(code)
                                                                         : gmm_e2m1_to_f32(code);
}
GMM__HD uint8_t gmm_encode_small(gmm_dtype dtype, float x) {
    return dtype == GMM_E4M3 ? gmm_f32_to_e4m3(x) : dtype == GMM_E5M2 ? gmm_f32_to_e5m2(x) : gmm_f32_to_e2m1(x);
}

GMM__HD uint8_t gmm_f32_to_e8m0(float x) {
    const uint32_t a = gmm_f32_bits(x) & 0x7FFFFFFFu, e = a >> 23, m = a & 0x7FFFFFu;
    if (a > 0x7F800000u) return 0xFFu;
    if (e == 255u) return 0xFEu;
    return (uint8_t)(e + (uint32_t)(m != 0u && e != 254u && !(e == 0u && m <= 0x400000u)));
}
GMM__HD uint8_t gmm_f32_to_e8m0_nosat(float x) {
    return (gmm_f32_bits(x) & 0x7FFFFFFFu) > 0x7F000000u ? (uint8_t)0xFFu : gmm_f32_to_e8m0(x);
}
GMM__HD float gmm_e8m0_to_f32(uint8_t k) {
    return gmm_f32_from_bits(k == 255u ? 0x7FFFFFFFu : k == 0u ? 0x00400000u : (uint32_t)k << 23);
}
/* 2^(127 - k): the encode scale of scale byte k, by which elements are multiplied when they are quantized. */
GMM__HD float gmm_e8m0_reciprocal(uint8_t k) {
    return gmm_f32_from_bits(k == 255u ? 0x7FFFFFFFu : k == 254u ? 0x00400000u : (254u - k) << 23);
}

/* Element i of packed E2M1: the low nibble holds the even one. */
GMM__HD uint8_t gmm_nibble(const void *base, int64_t i) {
    return (uint8_t)(((const uint8_t *)base)[i / 2] >> (i & 1) * 4 & 15);
}

/* Any of F32, F16, BF16 at element index i. */
GMM__HD float gmm_load(gmm_dtype dtype, const void *base, int64_t i) {
    if (dtype == GMM_BF16) return gmm_bf16_to_f32(((const uint16_t *)base)[i]);
    if (dtype == GMM_F16) return gmm_f16_to_f32(((const uint16_t *)base)[i]);
    return ((const float *)base)[i];
}
GMM__HD void gmm_store(gmm_dtype dtype, void *base, int64_t i, float v) {
    if (dtype == GMM_BF16) ((uint16_t *)base)[i] = gmm_f32_to_bf16(v);
    else if (dtype == GMM_F16) ((uint16_t *)base)[i] = gmm_f32_to_f16(v);
    else ((float *)base)[i] = v;
}

