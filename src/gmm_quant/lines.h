/* --- views of quantized operands, on the host and on the device --- */

/* Scales of one matrix of `lines` x `along` elements. */
GMM__HD int64_t gmm__scale_count(gmm_scaling scaling, int64_t lines, int64_t along) {
    switch (scaling) {
    case GMM_SCALING_TENSOR: return 1;
    case GMM_SCALING_ROW: return lines;
    case GMM_SCALING_1X128: return gmm__ceil_div(along, 128) * gmm__round_up(lines, 4);
    case GMM_SCALING_128X128: return gmm__ceil_div(lines, 128) * gmm__round_up(gmm__ceil_div(along, 128), 4);
    case GMM_SCALING_MX32:
    case GMM_SCALING_NV16:
        return gmm__round_up(lines, 128) * gmm__round_up(gmm__ceil_div(along, gmm_block_along(scaling)), 4);
    default: return 0;
    }
}

/* A copy of one group or matrix, as lines: its rows (ROWWISE) or columns (COLUMNWISE), along which blocks run. */
typedef struct gmm__qview {
    gmm_dtype dtype;
    gmm_scaling scaling;
    gmm_scale_order order;
    gmm_direction direction;
    int32_t mn_major;     /* place of element a of line l: 1: a * ld + l, as in the source (columnwise MX32);
                             0: l * ld + a */
    int32_t per_line;     /* amax has one value per line */
    int64_t ld;
    int64_t lines, along; /* lines and elements of a line, as the layout of the scales counts them (padded) */
    uint8_t *data;
    uint8_t *scale;
    float *amax;          /* NULL = none */
    float e4m3_max;
} gmm__qview;

/* Group or matrix g of a copy. Activations (grouped): the group's rows begin at row `row` of the source and at row
   `start` where groups are padded; matrices: row and start are 0. */
GMM__HD gmm__qview gmm__qview_of(const gmm_mat *m, gmm_direction direction, int grouped, int64_t g, int64_t row,
                                 int64_t start, int64_t rows, int64_t cols) {
    const int rowwise = direction == GMM_ROWWISE;
    const int64_t padded_rows = grouped ? gmm_group_rows(rows) : rows;
    const int64_t scale_bytes = m->scaling == GMM_SCALING_MX32 || m->scaling == GMM_SCALING_NV16 ? 1 : 4;
    int64_t element, scale;
    gmm__qview v;
    v.dtype = m->dtype;
    v.scaling = m->scaling;
    v.order = m->scale_order;
    v.direction = direction;
    v.mn_major = !rowwise && m->scaling == GMM_SCALING_MX32;
    v.per_line = (m->flags & (uint32_t)GMM_MAT_ROW_AMAX) != 0;
    v.ld = m->ld;
    v.lines = rowwise ? padded_rows : cols;
    v.along = rowwise ? cols : padded_rows;
    v.e4m3_max = m->flags & (uint32_t)GMM_MAT_E4M3_256 ? 256.0f : 448.0f;
    element = !grouped ? (m->table ? 0 : g * m->group_stride) : rowwise || v.mn_major ? row * m->ld : start;
    scale = grouped ? gmm_scale_base(m->scaling, direction, cols, g, row, start)
                    : m->scale_table ? 0 : g * gmm__scale_count(m->scaling, v.lines, v.along);
    v.data = (uint8_t *)(m->table ? m->table[g] : m->data);
    v.scale = (uint8_t *)(m->scale_table ? m->scale_table[g] : m->scale);
    if (v.data) v.data += m->dtype == GMM_E2M1 ? element / 2 : element;
    if (v.scale) v.scale += scale * scale_bytes;
    v.amax = m->amax ? m->amax + (v.per_line ? grouped ? row : g * rows : g) : NULL;
    return v;
}
GMM__HD int64_t gmm__qview_scale(const gmm__qview *v, int64_t l, int64_t j) {
    return gmm_scale_index(v->scaling, v->order, v->direction, v->lines, v->along, l, j);
}
GMM__HD uint8_t gmm__qview_code(const gmm__qview *v, int64_t l, int64_t a) {
    const int64_t i = v->mn_major ? a * v->ld + l : l * v->ld + a;
    return v->dtype == GMM_E2M1 ? gmm_nibble(v->data, i) : v->data[i];
}
/* Decode scale of block j of line l, by which its codes are multiplied. `whole` 0: only the part of it that differs by
   block, which is the scale byte of MX32 and NV16 and 1 for the others. */
GMM__HD float gmm__qview_factor(const gmm__qview *v, int64_t l, int64_t j, int whole) {
    const int64_t i = gmm__qview_scale(v, l, j);
    if (v->scaling == GMM_SCALING_MX32) return gmm_e8m0_to_f32(v->scale[i]);
    if (v->scaling == GMM_SCALING_NV16)
        return whole ? gmm_nv_decode(v->scale[i], v->amax[v->per_line ? l : 0], v->e4m3_max)
                     : gmm_e4m3_to_f32(v->scale[i]);
    return whole ? ((const float *)v->scale)[i] : 1.0f;
}
/* Copies the scales of tile (i, j) of 128 x 128 from a rowwise copy to the columnwise one, whose blocks are the same.
   The last tile of a column also writes the padding of these lines of scales. TENSOR and 128X128: one scale. */
GMM__HD void gmm__qview_transpose_scale(const gmm__qview *from, const gmm__qview *to, int64_t i, int64_t j) {
    const int tensor = to->scaling == GMM_SCALING_TENSOR;
    int64_t k;
    if (tensor && (i || j)) return;
    ((float *)(void *)to->scale)[tensor ? 0 : gmm__qview_scale(to, j * 128, i)] =
        ((const float *)(const void *)from->scale)[tensor ? 0 : gmm__qview_scale(from, i * 128, j)];
    if (tensor || i + 1 < gmm__ceil_div(to->along, 128)) return;
    for (k = i + 1; k % 4; k++) ((float *)(void *)to->scale)[gmm__qview_scale(to, j * 128, k)] = 0.0f;
}
/* NV16 of square blocks: 8 x 8 scales, and with the first tile the amax. Called by threads `first`, first + step, ...
   of a sequence. */
GMM__HD void gmm__qview_transpose_nv16_scales(const gmm__qview *from, const gmm__qview *to, int64_t i, int64_t j,
                                              int32_t first, int32_t step) {
    const int64_t used = gmm__ceil_div(to->along, 16), end = gmm__round_up(used, 4);
    int64_t k;
    for (k = first; k < 128 * 8; k += step) {
        const int64_t line = j * 128 + k / 8, block = i * 8 + k % 8;
        if (block < end)
            to->scale[gmm__qview_scale(to, line, block)] =
                line < to->lines && block < used ? from->scale[gmm__qview_scale(from, block * 16, line / 16)]
                                                 : (uint8_t)0;
    }
    if (first == 0 && i == 0 && j == 0) *to->amax = *from->amax;
}
/* One dequantized element; every NaN is 0x7FFFFFFF, so that CPU and GPU agree. */
GMM__HD float gmm__qview_value(float code, float decode_scale) {
    const float v = gmm__fmul(code, decode_scale);
    return (gmm_f32_bits(v) & 0x7FFFFFFFu) > 0x7F800000u ? gmm_f32_from_bits(0x7FFFFFFFu) : v;
}

/* --- products of scales --- */

/* A product of fp32 scales: value * 2^exponent, where 1 <= |value| < 2, or value is 0, Inf or NaN. Where the plain fp32
   product is normal, it is rounded like that; it neither overflows nor becomes subnormal in between. */
typedef struct gmm__scale {
    float value;
    int32_t exponent;
} gmm__scale;

GMM__HD float gmm__power_of_two(int32_t exponent) { return gmm_f32_from_bits((uint32_t)(exponent + 127) << 23); }
GMM__HD gmm__scale gmm__scale_of(float x) {
    const uint32_t a = gmm_f32_bits(x) & 0x7FFFFFFFu;
    gmm__scale s;
    s.value = x;
    s.exponent = 0;
    if (a == 0u || a >= 0x7F800000u) return s;
    if (a < 0x00800000u) { /* subnormal: the product is exact */
        s.value = gmm__fmul(x, gmm__power_of_two(24));
        s.exponent = -24;
    }
    s.exponent += (int32_t)(gmm_f32_bits(s.value) >> 23 & 255u) - 127;
    s.value = gmm_f32_from_bits((gmm_f32_bits(s.value) & 0x807FFFFFu) | 0x3F800000u);
    return s;
}
GMM__HD gmm__scale gmm__scale_times(gmm__scale s, float x) {
    const gmm__scale f = gmm__scale_of(x);
    gmm__scale p = gmm__scale_of(gmm__fmul(s.value, f.value));
    p.exponent += s.exponent + f.exponent;
    return p;
}
/* Splits a product of scales into two, by which a sum is multiplied one after the other: the product and 1 if it is
   normal; else a part with which sums of quantized elements stay normal, and a power of two. */
GMM__HD float gmm__scale_split(gmm__scale s, float *second) {
    const int32_t rest = s.exponent < -126 ? s.exponent + 94 : s.exponent > 127 ? s.exponent - 64 : 0;
    *second = gmm__power_of_two(rest < -126 ? -126 : rest > 127 ? 127 : rest);
    return gmm__fmul(s.value, gmm__power_of_two(rest < 0 ? -94 : rest > 0 ? 64 : s.exponent));
}
/* sum * (((alpha * a) * b) * inverse). `inverse`: 1, or of NV16 the reciprocal of 6 e4m3_max of each operand. */
GMM__HD float gmm__scale_sum(float sum, float alpha, float a, float b, float inverse) {
    float second;
    const float first = gmm__scale_split(
        gmm__scale_times(gmm__scale_times(gmm__scale_times(gmm__scale_of(alpha), a), b), inverse), &second);
    return gmm__fmul(gmm__fmul(sum, first), second);
}
GMM__HD int gmm__scale_normal(float x) { return (gmm_f32_bits(x) >> 23 & 255u) - 1u < 254u; }
/* Whether x is 0 or within 2^-32 and 2^32: the plain product of three such scales, also times
   the `inverse` of gmm__scale_sum, is normal or 0. */
GMM__HD int gmm__scale_moderate(float x) {
    const uint32_t a = gmm_f32_bits(x) & 0x7FFFFFFFu;
    return a == 0u || (a >> 23) - 95u < 64u;
}
/* The power of two by which the scale of a row's block is divided and that of a column's block is multiplied, so that
   the sum of 128 products of FP8 codes (0, or 2^-32 to 2^39) times the row's scale is a normal number. It is 1 but for
   extreme scales, and the second product loses nothing where the result is normal. */
GMM__HD float gmm__scale_lift(float row) {
    const uint32_t a = gmm_f32_bits(row) & 0x7FFFFFFFu;
    return gmm__power_of_two(a >= (85u + 127u) << 23 ? 40 : a != 0u && a < (127u - 94u) << 23 ? -55 : 0);
}

