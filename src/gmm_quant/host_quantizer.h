/* --- the host quantizer --- */

/* Codes of n values times the encode scale of their block: one loop per dtype, which compilers vectorise. */
static void gmm__encode_values(gmm_dtype dtype, const float *x, float encode_scale, int n, uint8_t *code) {
    int i;
    if (dtype == GMM_E4M3)
        for (i = 0; i < n; i++) code[i] = gmm_f32_to_e4m3(gmm__fmul(x[i], encode_scale));
    else if (dtype == GMM_E5M2)
        for (i = 0; i < n; i++) code[i] = gmm_f32_to_e5m2(gmm__fmul(x[i], encode_scale));
    else
        for (i = 0; i < n; i++) code[i] = gmm_f32_to_e2m1(gmm__fmul(x[i], encode_scale));
}

/* NV16 with four_over_six: the scale of a block by the rule above gmm_nv_scale. */
static uint8_t gmm__four_over_six(const gmm_tile *t, const gmm_nv_global *n, const float *x, int lines, int along,
                                  float amax) {
    const float base = gmm__fmul(gmm__fdiv(amax, 6.0f), n->scale);
    uint8_t scale[2];
    float error[2];
    int choice, i, j;
    scale[0] = gmm_f32_to_e4m3(base);
    scale[1] = gmm_f32_to_e4m3(gmm__fmul(base, 1.5f));
    for (choice = 0; choice < 2; choice++) {
        const float encode_scale = gmm_nv_encode(n, scale[choice]), block_scale = gmm_e4m3_to_f32(scale[choice]);
        float line_error[16] = { 0 };
        for (i = 0; i < lines; i++)
            for (j = 0; j < along; j++) {
                const float v = x[i * GMM_TILE + j];
                const float code = gmm_e2m1_to_f32(gmm_f32_to_e2m1(gmm__fmul(v, encode_scale)));
                /* volatile: neither the difference nor the sum may be contracted with a product */
                volatile float decoded = gmm__fdiv(gmm__fmul(gmm__fmul(code, block_scale), n->amax),
                                                   6.0f * n->e4m3_max);
                volatile float difference = decoded - v, square = difference * difference;
                line_error[i] += t->format->four_over_six == 2
                                     ? square : gmm_f32_from_bits(gmm_f32_bits(difference) & 0x7FFFFFFFu);
            }
        for (i = 8; i > 0; i /= 2)
            for (j = 0; j < i; j++) line_error[j] += line_error[j + i];
        error[choice] = line_error[0];
    }
    return error[1] < error[0] ? scale[1] : scale[0];
}

GMMDEF void gmm_quantize_tile(const gmm_tile *t, uint8_t *code, uint32_t *scale) {
    const gmm_format *f = t->format;
    const int nv = f->scaling == GMM_SCALING_NV16, mx = f->scaling == GMM_SCALING_MX32;
    const int width = nv ? 16 : mx ? 32 : GMM_TILE;
    const int height = f->scaling == GMM_SCALING_TENSOR || f->scaling == GMM_SCALING_128X128 ? GMM_TILE
                       : f->square ? width : 1;
    const float qmax = gmm_dtype_largest(f->dtype);
    int l0, b, i, j;
    for (l0 = 0; l0 < t->lines; l0 += height) {
        const int lines = t->lines - l0 < height ? t->lines - l0 : height;
        const float line_amax = t->amax ? t->amax[t->amax_per_line ? l0 : 0] : 0.0f;
        gmm_nv_global global = GMM_ZERO;
        if (nv) global = gmm_nv_global_of(line_amax, f->e4m3_256 ? 256.0f : 448.0f);
        for (b = 0; b * width < t->along; b++) {
            const float *x = t->x + l0 * GMM_TILE + b * width;
            uint8_t *dst = code + l0 * GMM_TILE + b * width;
            const int along = t->along - b * width < width ? t->along - b * width : width;
            uint32_t stored, random[4], bits = 0;
            float encode_scale, amax = line_amax;
            if (gmm_block_along(f->scaling)) {
                for (i = 0; i < lines; i++)
                    for (j = 0; j < along; j++) bits = gmm_amax_bits(bits, x[i * GMM_TILE + j]);
                amax = gmm_f32_from_bits(bits);
            }
            if (nv) {
                stored = f->four_over_six ? gmm__four_over_six(t, &global, x, lines, along, amax)
                                          : gmm_nv_scale(&global, amax);
                encode_scale = gmm_nv_encode(&global, (uint8_t)stored);
            } else if (mx) {
                stored = gmm_mx_scale(amax, f->dtype);
                encode_scale = gmm_e8m0_reciprocal((uint8_t)stored);
            } else {
                const int blocks = gmm_block_along(f->scaling) != 0;
                encode_scale = f->delayed ? t->scale
                                          : gmm_scale_from_amax(amax, qmax,
                                                                gmm_dtype_largest(blocks ? t->source : GMM_F32),
                                                                f->eps, f->pow2);
                stored = gmm_f32_bits(gmm_scale_inverse(encode_scale));
            }
            for (i = 0; i < lines; i++) {
                scale[(l0 + i) * GMM_TILE_BLOCKS + b] = stored;
                if (!f->stochastic) {
                    gmm__encode_values(f->dtype, x + i * GMM_TILE, encode_scale, along, dst + i * GMM_TILE);
                    continue;
                }
                gmm_draw_block(t->seed, t->offset, t->group, t->first_block + (l0 + i) * t->blocks_per_line + b,
                               t->direction, random);
                for (j = 0; j < along; j++)
                    dst[i * GMM_TILE + j] = gmm_f32_to_e2m1_random(gmm__fmul(x[i * GMM_TILE + j], encode_scale),
                                                                   random[j / 4] >> j % 4 * 8 & 0xFFu);
            }
        }
    }
}

