/* -------------------------------------------------------------------------------- 7 Quantization arithmetic --- */

/* Single fp32 operations, rounded to nearest even and never contracted, so that CPU and GPU agree to the bit whatever
   flags the CUDA compiler gets. The host must be compiled without -ffast-math and run without FTZ and DAZ. Values are
   compared by their bits, which no flag flushes. */
GMM__HD float gmm__fmul(float a, float b) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_mul_rn_f32(a, b);
#else
    return a * b;
#endif
}
GMM__HD float gmm__fadd(float a, float b) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_add_rn_f32(a, b);
#else
    return a + b;
#endif
}
GMM__HD float gmm__fdiv(float a, float b) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_div_rn_f32(a, b);
#else
    return a / b;
#endif
}
/* The smaller of a non-negative value and the largest finite one. */
GMM__HD float gmm__finite_cap(float x) { return gmm_f32_bits(x) > 0x7F7FFFFFu ? gmm_f32_from_bits(0x7F7FFFFFu) : x; }

/* max(amax, |x|) on the bits of non-negative values. A NaN in x is ignored. */
GMM__HD uint32_t gmm_amax_bits(uint32_t amax, float x) {
    const uint32_t a = gmm_f32_bits(x) & 0x7FFFFFFFu;
    return a > 0x7F800000u || a < amax ? amax : a;
}

/* Largest finite value of a dtype; 0 if it has none. */
GMM__HD float gmm_dtype_largest(gmm_dtype dtype) {
    switch ((int)dtype) {
    case GMM_F32: return gmm_f32_from_bits(0x7F7FFFFFu);
    case GMM_BF16: return gmm_f32_from_bits(0x7F7F0000u);
    case GMM_F16: return 65504.0f;
    case GMM_E4M3: return 448.0f;
    case GMM_E5M2: return 57344.0f;
    case GMM_E2M1: return 6.0f;
    default: return 0.0f;
    }
}

/* Quantization scale of TENSOR, ROW, 1X128 and 128X128: elements are multiplied by it; what dequantizes is 1 / scale.
   qmax / max(amax, eps); 1 where amax is 0, Inf or NaN; `largest` (of fp32, or of the source dtype for blocks) where
   the quotient is infinite; floored to a power of two if pow2. */
GMM__HD float gmm_scale_from_amax(float amax, float qmax, float largest, float eps, int pow2) {
    float s;
    if (gmm_f32_bits(amax) < gmm_f32_bits(eps)) amax = eps;
    if (gmm_f32_bits(amax) == 0u || gmm_f32_bits(amax) >= 0x7F800000u) return 1.0f;
    s = gmm__fdiv(qmax, amax);
    if (gmm_f32_bits(s) >= 0x7F800000u) s = largest;
    return pow2 ? gmm_f32_from_bits(gmm_f32_bits(s) & 0xFF800000u) : s;
}
GMM__HD float gmm_scale_inverse(float scale) { return gmm__fdiv(1.0f, scale); }

/* E8M0 scale of an MX32 block: the least power of two by which amax still fits the dtype. Formats of 8 bits as in
   MXFP8; for E2M1 (MXFP4) the same rule with 6. One fp32 value of each dtype, next above its largest times 2^-127, gets
   2^-127 as well: it saturates by an ulp of fp32. An element next to the largest fp32 rounds to a code that means 2^128
   and dequantizes to Inf: |x| from 248 * 2^120 (E4M3), 240 * 2^120 (E5M2) or 224 * 2^120 (E2M1) on. */
GMM__HD uint8_t gmm_mx_scale(float amax, gmm_dtype dtype) {
    const uint32_t inverse = dtype == GMM_E4M3 ? 0x3B124925u : dtype == GMM_E5M2 ? 0x37924925u : 0x3E2AAAABu;
    return gmm_f32_to_e8m0(gmm__fmul(amax, gmm_f32_from_bits(inverse)));
}

/* NV16: what the global amax gives. `e4m3_max` is the largest scale byte, 448, or 256 with gmm_format.e4m3_256. */
typedef struct gmm_nv_global {
    float amax, e4m3_max;
    float scale;   /* S, the global encode scale: 6 e4m3_max / amax */
    float inverse; /* 1 / S */
    float mult;    /* S / 6 */
} gmm_nv_global;

GMM__HD gmm_nv_global gmm_nv_global_of(float amax, float e4m3_max) {
    gmm_nv_global n;
    n.amax = amax;
    n.e4m3_max = e4m3_max;
    n.scale = gmm__finite_cap(gmm__fdiv(6.0f * e4m3_max, amax));
    if (gmm_f32_bits(amax) == 0u || gmm_f32_bits(n.scale) == 0u) n.scale = 1.0f;
    n.inverse = gmm__fdiv(1.0f, n.scale);
    n.mult = gmm__fmul(n.scale, gmm_f32_from_bits(0x3E2AAAABu));
    return n;
}
/* Scale byte of a block, E4M3 without a sign; and its encode scale, by which its elements are multiplied.
   With gmm_format.four_over_six a block has two candidates instead. Each operation is rounded to fp32. With base =
   (amax / 6) S they are the scale bytes E4M3(base), by which amax becomes 6, and E4M3(1.5 base), by which it becomes 4,
   saturating at 448. Elements are coded by gmm_nv_encode of each byte and decoded as ((code scale) A) / (6 e4m3_max),
   A the global amax. The error of a candidate is the sum of |decoded - x|, or of its square, over the elements in their
   order; in a square tile each line has such a sum, and the sums of lines l and l + 8 are added, then those 4, 2 and 1
   apart. The second candidate is taken if its error is less; if errors are equal or one is NaN, the first. */
GMM__HD uint8_t gmm_nv_scale(const gmm_nv_global *n, float amax) {
    return gmm_f32_to_e4m3(gmm__finite_cap(gmm__fmul(amax, n->mult)));
}
GMM__HD float gmm_nv_encode(const gmm_nv_global *n, uint8_t scale) {
    return gmm__finite_cap(gmm__fdiv(1.0f, gmm__fmul(gmm_e4m3_to_f32(scale), n->inverse)));
}
/* What an element of a block is multiplied by when it is dequantized. The scale byte times an amax from 2^100 on could
   overflow, so that 2^16 of such an amax is applied last. */
GMM__HD float gmm_nv_decode(uint8_t scale, float amax, float e4m3_max) {
    const uint32_t inverse = e4m3_max == 256.0f ? 0x3A2AAAABu : 0x39C30C31u; /* 1 / 1536 and 1 / 2688 */
    const uint32_t bits = gmm_f32_bits(amax) & 0x7FFFFFFFu;
    const int large = bits >= (127u + 100u) << 23 && bits < 0x7F800000u;
    const float f = gmm__fmul(gmm_e4m3_to_f32(scale), large ? gmm__fmul(amax, 1.52587890625e-5f) : amax);
    return gmm__fmul(gmm__fmul(f, gmm_f32_from_bits(inverse)), large ? 65536.0f : 1.0f);
}

/* Philox4x32-10: four random words of a counter and a key. */
GMM__HD void gmm_philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32), c[4];
    int round;
    c[0] = counter[0]; c[1] = counter[1]; c[2] = counter[2]; c[3] = counter[3];
    for (round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t p = (uint64_t)0xD2511F53u * c[0], q = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(q >> 32) ^ c[1] ^ k0;
        c[2] = (uint32_t)(p >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)q;
        c[3] = (uint32_t)p;
    }
    out[0] = c[0]; out[1] = c[1]; out[2] = c[2]; out[3] = c[3];
}
/* Random bytes of one block of 16: element i uses byte i % 4 (from the lowest) of word i / 4. They depend on seed and
   offset (the caller's state), the group (below 2^24), the block's index within the group (below 2^40) and the
   direction, so a group's bits depend on nothing else. Block j of line l has the index l B + j, B the blocks of a line.
   ROWWISE: l is the row counted from the group's first, B = ceil(columns / 16). COLUMNWISE: l is the column, B =
   ceil(rows / 16) of the group's own rows, without padding; so these bits change with the number of rows. */
GMM__HD void gmm_draw_block(uint64_t seed, uint64_t offset, int64_t group, int64_t block, gmm_direction direction,
                            uint32_t out[4]) {
    uint32_t counter[4];
    counter[0] = (uint32_t)block;
    counter[1] = (uint32_t)group ^ (uint32_t)((uint64_t)block >> 32) << 24;
    counter[2] = (uint32_t)offset;
    counter[3] = (uint32_t)(offset >> 32) ^ (uint32_t)direction << 31;
    gmm_philox(counter, seed, out);
}
/* E2M1 by stochastic rounding: up with the probability of the distance to the lower neighbour, in steps of 1/256.
   Beyond 6 it saturates; a NaN becomes +6. `byte` is 0 to 255. */
GMM__HD uint8_t gmm_f32_to_e2m1_random(float x, uint32_t byte) {
    const uint32_t u = gmm_f32_bits(x), a = u & 0x7FFFFFFFu, sign = u >> 28 & 8u;
    const float v = gmm_f32_from_bits(a), fraction = (float)(int32_t)byte * 0.00390625f;
    float t;
    uint32_t code;
    if (a > 0x7F800000u) return 7u;
    if (a >= 0x40C00000u) return (uint8_t)(sign | 7u); /* 6 and above */
    /* the fraction times a power of two is exact: one rounding */
    t = gmm__fadd(v, gmm__fmul(fraction, a < 0x40000000u ? 0.5f : a < 0x40800000u ? 1.0f : 2.0f));
    code = t < 2.0f ? (uint32_t)(int32_t)(t * 2.0f) : t < 4.0f ? 2u + (uint32_t)(int32_t)t
                                                              : 4u + (uint32_t)(int32_t)(t * 0.5f);
    return (uint8_t)(sign | (code > 7u ? 7u : code));
}

/* Random Hadamard transform of 16 values in place: y = 0.25 H16 (x .* s), each rounded to BF16; bit i of `signs` makes
   s_i = -1. Stages of strides 1, 2, 4, 8 in fp32. It is orthogonal: products of two transformed operands are those of
   the operands. */
enum { GMM_HADAMARD = 0x10000, GMM_HADAMARD_SIGNS = 0xD7E8 };
GMM__HD void gmm_hadamard16(float x[16], uint32_t signs) {
    int i, stride;
    for (i = 0; i < 16; i++) x[i] = gmm_f32_from_bits(gmm_f32_bits(x[i]) ^ (signs >> i & 1u) << 31);
    for (stride = 1; stride < 16; stride *= 2)
        for (i = 0; i < 16; i++)
            if (!(i & stride)) {
                const float a = x[i], b = x[i + stride];
                x[i] = gmm__fadd(a, b);
                x[i + stride] = gmm__fadd(a, gmm_f32_from_bits(gmm_f32_bits(b) ^ 0x80000000u));
            }
    for (i = 0; i < 16; i++) x[i] = gmm_bf16_to_f32(gmm_f32_to_bf16(gmm__fmul(x[i], 0.25f)));
}

/* One update of delayed scaling for one tensor: reads history[0], the amax since the last update (instead of it
   `reduced`, the maximum over ranks, if that is above 0), rolls history[0..length), whose entries are `stride` floats
   apart, and returns the next scale, from the largest entry or, if most_recent, from the last amax. An amax of 0
   changes nothing; one of Inf or NaN keeps the scale. */
GMM__HD float gmm_delayed_scale(float *history, int64_t stride, int32_t length, float qmax, int32_t margin,
                                int most_recent, float reduced, float scale) {
    const float last = gmm_f32_bits(reduced) == 0u ? history[0] : reduced;
    uint32_t amax = gmm_amax_bits(0u, last);
    int32_t i;
    float s;
    if ((gmm_f32_bits(last) & 0x7FFFFFFFu) == 0u) return scale;
    if (gmm_f32_bits(last) > 0x7F800000u) amax = 0x7F800000u; /* a NaN keeps the scale, as an infinity does */
    for (i = 1; i < length && !most_recent; i++) amax = gmm_amax_bits(amax, history[i * stride]);
    for (i = 1; i + 1 < length; i++) history[i * stride] = history[(i + 1) * stride];
    if (length > 1) history[(length - 1) * stride] = last;
    history[0] = 0.0f;
    if (amax == 0u || amax >= 0x7F800000u) return scale;
    s = gmm__fdiv(gmm_f32_from_bits(gmm_f32_bits(qmax) - ((uint32_t)margin << 23)), gmm_f32_from_bits(amax));
    return gmm__finite_cap(s);
}

