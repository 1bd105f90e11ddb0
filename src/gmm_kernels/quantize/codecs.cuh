/* --- codecs of the NV16 casts: E2M1 codes and Hadamard transforms of registers --- */

/* Sign bits of eight values, at bit 3 of each nibble. */
GMM__DEVICE uint32_t gmm_e2m1_signs(const float v[8]) {
    const uint32_t odd = __byte_perm(__byte_perm(gmm_f32_bits(v[1]), gmm_f32_bits(v[3]), 0x0073),
                                     __byte_perm(gmm_f32_bits(v[5]), gmm_f32_bits(v[7]), 0x0073), 0x5410);
    const uint32_t even = __byte_perm(__byte_perm(gmm_f32_bits(v[0]), gmm_f32_bits(v[2]), 0x0073),
                                      __byte_perm(gmm_f32_bits(v[4]), gmm_f32_bits(v[6]), 0x0073), 0x5410);
    return (odd & 0x80808080u) | ((even >> 4) & 0x08080808u);
}
/* |v encode_scale|; saturate: 6 if it is larger or NaN. */
GMM__DEVICE float gmm_e2m1_product(float v, float encode_scale, int saturate) {
    const float m = gmm_mul_abs_f32(v, encode_scale);
    return saturate ? gmm_min_6_f32(m) : m;
}
/* E2M1 codes of eight values times |encode_scale|. The code of an absolute value m is 2 m up to 2, m + 2 up to 4, and
   m / 2 + 4 up to 6, each rounded to even once by an addition to 2^23; the smallest of the three is the right one.
   Products either saturate at 6 (`saturate`), or none of them may be NaN or reach 7. */
GMM__DEVICE uint32_t gmm_e2m1x8(const float v[8], float encode_scale, int saturate) {
    uint32_t codes = 0;
    int32_t j;
#pragma unroll
    for (j = 7; j >= 0; j--) {
        uint32_t low, middle, high;
        gmm_e2m1_candidates(gmm_e2m1_product(v[j], encode_scale, saturate), &low, &middle, &high);
        low = low < middle ? low : middle;
        codes = codes * 16 + (low < high ? low : high);
    }
    codes -= 0xFB000000u; /* 0x4B000000 times 1 + 16 + ... + 16^7 */
    return codes | gmm_e2m1_signs(v);
}
/* The same with stochastic rounding as in gmm_f32_to_e2m1_random; element j uses byte j % 4 of word j / 4. A product
   is increased by a random fraction of the E2M1 step and truncated: multiplied by 2^-126, bits 22 and up are the
   code. */
GMM__DEVICE uint32_t gmm_e2m1x8_random(const float v[8], float encode_scale, const uint32_t random[2]) {
    uint32_t codes = 0;
    int32_t j;
#pragma unroll
    for (j = 7; j >= 0; j--) {
        const float m = gmm_e2m1_product(v[j], encode_scale, 1);
        /* 128 plus the random byte times 2^-8 */
        const float fraction_plus_128 =
            gmm_f32_from_bits(__byte_perm(random[j / 4], 0x43000000u, 0x7404 | (j & 3) << 4));
        const uint32_t bits = gmm_e2m1_add_fraction(m, fraction_plus_128);
        codes = codes * 16 + (bits >> 22);
    }
    return codes | gmm_e2m1_signs(v);
}
/* Transposes an 8 x 8 matrix of nibbles: nibble j of word i becomes nibble i of word j. */
GMM__DEVICE void gmm_e2m1_transpose8x8(uint32_t w[8]) {
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i += 2) {
        const uint32_t low = (w[i] & 0x0F0F0F0Fu) | ((w[i + 1] << 4) & 0xF0F0F0F0u);
        w[i + 1] = ((w[i] >> 4) & 0x0F0F0F0Fu) | (w[i + 1] & 0xF0F0F0F0u);
        w[i] = low;
    }
#pragma unroll
    for (i = 0; i < 8; i++)
        if (!(i & 2)) {
            const uint32_t low = __byte_perm(w[i], w[i + 2], 0x6240);
            w[i + 2] = __byte_perm(w[i], w[i + 2], 0x7351);
            w[i] = low;
        }
#pragma unroll
    for (i = 0; i < 4; i++) {
        const uint32_t low = __byte_perm(w[i], w[i + 4], 0x5410);
        w[i + 4] = __byte_perm(w[i], w[i + 4], 0x7632);
        w[i] = low;
    }
}

/* BF16: clears the sign of NaN. */
GMM__DEVICE uint32_t gmm_hadamard_positive_nan(uint32_t w) {
    if ((w & 0x7FFFu) > 0x7F80u) w &= 0xFFFF7FFFu;
    if ((w & 0x7FFF0000u) > 0x7F800000u) w &= 0x7FFFFFFFu;
    return w;
}
/* BF16: flips the signs of the rows whose bit in `signs` is 1: gmm_format.hadamard, whose lower 16 bits are the signs
   by row of a block, shifted to the lane's 8 rows. gmm_hadamard_gather16 then exchanges words between the two
   lanes of 16 rows, so that 8 rows by 8 columns become 16 rows by 4 columns: the left columns in the upper lane, the
   right ones in the lower lane. */
GMM__DEVICE void gmm_hadamard_flip_signs(uint32_t x[8][8], uint32_t signs) {
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++) {
        const uint32_t flip = ((signs >> i) & 1u) * 0x80008000u;
#pragma unroll
        for (k = 0; k < 4; k++) x[i][k] ^= flip;
    }
}
GMM__DEVICE void gmm_hadamard_gather16(const uint32_t x[8][8], int32_t lower, uint32_t dst[16][2]) {
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++)
#pragma unroll
        for (k = 0; k < 2; k++) {
            const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, lower ? x[i][k] : x[i][k + 2], 8);
            dst[i][k] = lower ? received : x[i][k];
            dst[i + 8][k] = lower ? x[i][k + 2] : received;
        }
}
/* Column j of a lane's four columns as words of two rows, Hadamard-transformed without the signs of rows if
   `hadamard`. NaN loses its sign. */
GMM__DEVICE void gmm_hadamard_column16(const uint32_t x[16][2], int32_t j, int32_t hadamard, uint32_t dst[8]) {
    float v[16];
    int32_t i;
#pragma unroll
    for (i = 0; i < 16; i++) v[i] = gmm__word_value(GMM_BF16, x[i], j);
    if (hadamard) {
        gmm_hadamard_stages(v, 16, 8);
#pragma unroll
        for (i = 0; i < 16; i++) v[i] = gmm__fmul(v[i], 0.25f);
    }
#pragma unroll
    for (i = 0; i < 8; i++)
        dst[i] = gmm_cvt_bf16x2(v[2 * i + 1], v[2 * i]);
}
/* Largest absolute value of the transforms of this lane's and its neighbour's blocks of 16, as bits of an fp32
   rounded to BF16. The last stage takes |a| + |b|, the larger of |a + b| and |a - b|, so that it needs no order. */
GMM__DEVICE uint32_t gmm_hadamard_amax(const uint32_t x[8][8], int32_t lower) {
    float maximum = 0.0f;
    uint32_t bits;
    int32_t i, k, half;
#pragma unroll
    for (k = 0; k < 2; k++) {
        uint32_t own[8], received[8];
#pragma unroll
        for (i = 0; i < 8; i++) {
            received[i] = __shfl_xor_sync(0xFFFFFFFFu, lower ? x[i][k] : x[i][k + 2], 8);
            own[i] = lower ? x[i][k + 2] : x[i][k];
        }
#pragma unroll
        for (half = 0; half < 2; half++) {
            float a[8], b[8];
#pragma unroll
            for (i = 0; i < 8; i++) {
                a[i] = gmm__word_value(GMM_BF16, &own[i], half);
                b[i] = gmm__word_value(GMM_BF16, &received[i], half);
            }
            gmm_hadamard_stages(a, 8, 4);
            gmm_hadamard_stages(b, 8, 4);
#pragma unroll
            for (i = 0; i < 8; i++)
                maximum = gmm_max_sum_abs_f32(maximum, a[i], b[i]);
        }
    }
    bits = gmm_f32_to_bf16(gmm__fmul(maximum, 0.25f));
    return bits << 16;
}

