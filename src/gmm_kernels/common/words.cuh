/* --- packed elements, maxima of absolute values, FP8 codes: for vectorized casts and epilogues that quantize --- */

/* Registers hold elements in memory format: two of 16 bits per word, or one F32. `source` is their dtype, a constant.
   Maxima are of absolute values and ignore NaN; the instructions keep subnormal values whatever the compiler flags. */

/* Words of eight elements; elements in sixteen bytes. */
GMM__DEVICE int32_t gmm__words8(gmm_dtype source) { return source == GMM_F32 ? 8 : 4; }
GMM__DEVICE int32_t gmm__elems16(gmm_dtype source) { return source == GMM_F32 ? 4 : 8; }

/* Element j of consecutive words. */
GMM__DEVICE float gmm__word_value(gmm_dtype source, const uint32_t *w, int32_t j) {
    if (source == GMM_F32) return gmm_f32_from_bits(w[j]);
    if (source == GMM_BF16) return gmm_f32_from_bits(j & 1 ? w[j / 2] & 0xFFFF0000u : w[j / 2] << 16);
    return gmm_cvt_f32_f16((uint16_t)(j & 1 ? w[j / 2] >> 16 : w[j / 2]));
}
GMM__DEVICE uint32_t gmm__word_max(gmm_dtype source, uint32_t maximum, uint32_t w) {
    if (source == GMM_F32) return gmm_max_abs_f32(maximum, w);
    return source == GMM_BF16 ? gmm_max_bf16x2(maximum, w & 0x7FFF7FFFu) : gmm_max_f16x2(maximum, w & 0x7FFF7FFFu);
}
/* The maximum that is NaN if an operand is NaN. */
GMM__DEVICE uint32_t gmm__word_max_nan(gmm_dtype source, uint32_t maximum, uint32_t w) {
    if (source == GMM_F32) return gmm_max_nan_abs_f32(maximum, w);
    return source == GMM_BF16 ? gmm_max_nan_bf16x2(maximum, w & 0x7FFF7FFFu)
                              : gmm_max_nan_f16x2(maximum, w & 0x7FFF7FFFu);
}
/* The maximum in fewer instructions, for chains that start with an unmodified word: the sign of the result is
   meaningless, and a result is NaN only if all operands are. gmm__word_max(0, result) is the absolute value, 0 for
   NaN. */
GMM__DEVICE uint32_t gmm__word_max_signed(gmm_dtype source, uint32_t maximum, uint32_t w) {
    if (source == GMM_F32) return gmm_max_abs_abs_f32(maximum, w);
#if __CUDA_ARCH__ >= 860
    return source == GMM_BF16 ? gmm_max_xorsign_abs_bf16x2(maximum, w) : gmm_max_xorsign_abs_f16x2(maximum, w);
#else
    return gmm__word_max(source, maximum & 0x7FFF7FFFu, w);
#endif
}
/* The larger half of a word of maxima, as bits of an fp32. */
GMM__DEVICE uint32_t gmm__word_fold(gmm_dtype source, uint32_t maximum) {
    if (source == GMM_F32) return maximum;
    if (source == GMM_BF16) return max(maximum << 16, maximum & 0xFFFF0000u);
    maximum = max(maximum & 0xFFFFu, maximum >> 16);
    return gmm_f32_bits(gmm__word_value(source, &maximum, 0));
}

/* FP8 codes of four values, the first in the lowest bits. The instructions give the same bits as the codecs of
   gmm_quant.h. */
GMM__DEVICE uint32_t gmm_encode_fp8x4(int32_t e5m2, const float p[4]) {
#if __CUDA_ARCH__ >= 890
    uint16_t low, high;
    if (e5m2) {
        low = gmm_cvt_e5m2x2(p[1], p[0]);
        high = gmm_cvt_e5m2x2(p[3], p[2]);
    } else {
        low = gmm_cvt_e4m3x2(p[1], p[0]);
        high = gmm_cvt_e4m3x2(p[3], p[2]);
    }
    return (uint32_t)low | (uint32_t)high << 16;
#else
    const gmm_dtype dtype = e5m2 ? GMM_E5M2 : GMM_E4M3;
    return (uint32_t)gmm_encode_small(dtype, p[0]) | (uint32_t)gmm_encode_small(dtype, p[1]) << 8 |
           (uint32_t)gmm_encode_small(dtype, p[2]) << 16 | (uint32_t)gmm_encode_small(dtype, p[3]) << 24;
#endif
}
