/* --- quantization of master weights that are sharded over ranks --- */

/* Arguments of gmm_shard_cast, with tables in the memory of the engine. The masters are `count` matrices of `rows` x
   `cols`, one after another; the shard is their elements [start, start + length). */
typedef struct gmm__shard_args {
    gmm_format format;
    gmm_dtype model;             /* dtype to which masters are rounded first */
    int64_t count, rows, cols, start, length;
    const float *master, *scale; /* [length] of the shard; [count] delayed: quantization scales */
    float *amax;                 /* in the order of gmm__shard_amax_at */
    gmm_mat copy[2]; /* by direction; dtype GMM_NONE = absent */
} gmm__shard_args;

/* Whether blocks of columnwise copies differ from those of rowwise copies, so that they have amaxes of their own. */
GMM__HD int gmm__shard_separate(const gmm_format *f) {
    return !f->square && (f->scaling == GMM_SCALING_1X128 || f->scaling == GMM_SCALING_MX32 ||
                          f->scaling == GMM_SCALING_NV16);
}
/* Rows and columns of the blocks that share a scale. */
GMM__HD void gmm__shard_extents(const gmm_format *f, int64_t rows, int64_t cols, int columnwise, int64_t extent[2]) {
    const int64_t along = gmm_block_along(f->scaling);
    const int separate = gmm__shard_separate(f);
    extent[0] = f->scaling == GMM_SCALING_TENSOR ? rows : separate && !columnwise ? 1 : along;
    extent[1] = f->scaling == GMM_SCALING_TENSOR ? cols : separate && columnwise ? 1 : along;
}
/* Number of blocks of all matrices. gmm__shard_amax_at is the index of a block's amax: those of NV16's matrices come
   first, then those of rowwise blocks, then those of columnwise blocks if they are separate. */
GMM__HD int64_t gmm__shard_blocks(const gmm_format *f, int64_t count, int64_t rows, int64_t cols, int columnwise) {
    int64_t extent[2];
    gmm__shard_extents(f, rows, cols, columnwise, extent);
    return count * gmm__ceil_div(rows, extent[0]) * gmm__ceil_div(cols, extent[1]);
}
GMM__HD int64_t gmm__shard_amax_at(const gmm__shard_args *s, int columnwise, int64_t member, int64_t row, int64_t col) {
    const gmm_format *f = &s->format;
    const int64_t first = (f->scaling == GMM_SCALING_NV16 ? s->count : 0) +
                          (columnwise && gmm__shard_separate(f)
                               ? gmm__shard_blocks(f, s->count, s->rows, s->cols, 0) : 0);
    int64_t extent[2];
    gmm__shard_extents(f, s->rows, s->cols, columnwise, extent);
    return first + (member * gmm__ceil_div(s->rows, extent[0]) + row / extent[0]) * gmm__ceil_div(s->cols, extent[1]) +
           col / extent[1];
}
/* Element i of the shard, rounded to the model's dtype. */
GMM__HD float gmm__shard_value(const gmm__shard_args *s, int64_t i) {
    const float v = s->master[i];
    return s->model == GMM_BF16 ? gmm_bf16_to_f32(gmm_f32_to_bf16(v))
           : s->model == GMM_F16 ? gmm_f16_to_f32(gmm_f32_to_f16(v)) : v;
}
/* The encode scale of an element's block, from amaxes that ranks have reduced. *stored: the scale as copies hold
   it. */
GMM__HD float gmm__shard_encode_scale(const gmm__shard_args *s, int columnwise, int64_t member, int64_t row,
                                      int64_t col, uint32_t *stored) {
    const gmm_format *f = &s->format;
    const float amax = f->delayed ? 0.0f : s->amax[gmm__shard_amax_at(s, columnwise, member, row, col)];
    float encode_scale;
    if (f->scaling == GMM_SCALING_NV16) {
        const gmm_nv_global n = gmm_nv_global_of(s->amax[member], 448.0f);
        *stored = gmm_nv_scale(&n, amax);
        return gmm_nv_encode(&n, (uint8_t)*stored);
    }
    if (f->scaling == GMM_SCALING_MX32) {
        *stored = gmm_mx_scale(amax, f->dtype);
        return gmm_e8m0_reciprocal((uint8_t)*stored);
    }
    encode_scale = f->delayed ? s->scale ? s->scale[member] : 1.0f
                              : gmm_scale_from_amax(
                                    amax, gmm_dtype_largest(f->dtype),
                                    gmm_dtype_largest(f->scaling == GMM_SCALING_TENSOR ? GMM_F32 : s->model),
                                    f->eps, f->pow2);
    *stored = gmm_f32_bits(gmm_scale_inverse(encode_scale));
    return encode_scale;
}
/* Extents of a matrix's scales with padding: *lines lines (128X128: blocks of lines) of *blocks scales. */
GMM__HD void gmm__shard_scales(const gmm__shard_args *s, int columnwise, int64_t *lines, int64_t *blocks) {
    const gmm_scaling scaling = s->format.scaling;
    const int64_t l = columnwise ? s->cols : s->rows, along = columnwise ? s->rows : s->cols;
    const int64_t width = gmm_block_along(scaling), b = width ? gmm__ceil_div(along, width) : 1;
    *lines = scaling == GMM_SCALING_TENSOR ? 1 : scaling == GMM_SCALING_128X128 ? gmm__ceil_div(l, 128)
             : scaling == GMM_SCALING_1X128 ? gmm__round_up(l, 4) : gmm__round_up(l, 128);
    *blocks = scaling == GMM_SCALING_TENSOR || scaling == GMM_SCALING_1X128 ? b : gmm__round_up(b, 4);
}
/* Stores scale i of all scales of a copy, padding included. */
GMM__HD void gmm__shard_store_scale(const gmm__shard_args *s, int columnwise, int64_t i) {
    const gmm_scaling scaling = s->format.scaling;
    const int64_t height = scaling == GMM_SCALING_128X128 ? 128 : 1, width = gmm_block_along(scaling);
    int64_t lines, blocks, member, line, block, index, line0, along0;
    uint32_t stored = 0;
    gmm__qview v;
    gmm__shard_scales(s, columnwise, &lines, &blocks);
    member = i / (lines * blocks);
    line = i / blocks % lines;
    block = i % blocks;
    v = gmm__qview_of(&s->copy[columnwise], columnwise ? GMM_COLUMNWISE : GMM_ROWWISE, 0, member, 0, 0, s->rows,
                      s->cols);
    line0 = line * height;
    along0 = block * width;
    index = gmm__qview_scale(&v, line0, block);
    if (line0 < v.lines && along0 < v.along)
        (void)gmm__shard_encode_scale(s, columnwise, member, columnwise ? along0 : line0, columnwise ? line0 : along0,
                                      &stored);
    if (scaling == GMM_SCALING_MX32 || scaling == GMM_SCALING_NV16) v.scale[index] = (uint8_t)stored;
    else ((uint32_t *)(void *)v.scale)[index] = stored;
    if (line == 0 && block == 0 && v.amax && s->amax && !s->format.delayed &&
        (scaling == GMM_SCALING_NV16 || scaling == GMM_SCALING_TENSOR))
        *v.amax = s->amax[member];
}
/* Whether a copy is transposed: the elements of a column are contiguous. */
GMM__HD int gmm__shard_transposed(const gmm__shard_args *s, int columnwise) {
    return columnwise && s->format.scaling != GMM_SCALING_MX32;
}
/* Stores the codes of elements 2 i and 2 i + 1 of all matrices, if they are in the shard. Two codes of E2M1 share a
   byte; a matrix has an even number of elements. */
GMM__HD void gmm__shard_store_pair(const gmm__shard_args *s, int columnwise, int64_t i) {
    const int64_t size = s->rows * s->cols, member = 2 * i / size;
    const gmm__qview v = gmm__qview_of(&s->copy[columnwise], columnwise ? GMM_COLUMNWISE : GMM_ROWWISE, 0, member, 0, 0,
                                       s->rows, s->cols);
    int64_t e;
    for (e = 2 * i; e < 2 * i + 2; e++) {
        const int64_t row = e % size / s->cols, col = e % s->cols, index = row * v.ld + col;
        uint32_t stored;
        uint8_t code;
        if (e < s->start || e >= s->start + s->length) continue;
        code = gmm_encode_small(v.dtype, gmm__fmul(gmm__shard_value(s, e - s->start),
                                                   gmm__shard_encode_scale(s, columnwise, member, row, col, &stored)));
        if (v.dtype != GMM_E2M1) v.data[index] = code;
        else
            v.data[index / 2] = (uint8_t)((v.data[index / 2] & (index & 1 ? 0x0F : 0xF0)) |
                                          code << (index & 1 ? 4 : 0));
    }
}
/* Rows of a strip. They have one scale in each column, and their codes fill bytes. */
enum { GMM__SHARD_STRIP = 8 };
GMM__HD int64_t gmm__shard_strips(const gmm__shard_args *s) { return gmm__ceil_div(s->rows, GMM__SHARD_STRIP); }
/* Stores the codes of one column of a strip in the transposed copy, as far as they are in the shard. The strips of all
   matrices follow one another: i = strip * cols + column. */
GMM__HD void gmm__shard_store_column(const gmm__shard_args *s, int64_t i) {
    const int64_t strip = i / s->cols, col = i % s->cols, member = strip / gmm__shard_strips(s);
    const int64_t row = strip % gmm__shard_strips(s) * GMM__SHARD_STRIP;
    const int64_t rows = s->rows - row < GMM__SHARD_STRIP ? s->rows - row : (int64_t)GMM__SHARD_STRIP;
    const int64_t first = (member * s->rows + row) * s->cols + col - s->start; /* element of the strip's first row */
    const gmm__qview v = gmm__qview_of(&s->copy[1], GMM_COLUMNWISE, 0, member, 0, 0, s->rows, s->cols);
    const int32_t bits = v.dtype == GMM_E2M1 ? 4 : 8;
    uint8_t *dst = v.data + (col * v.ld + row) * bits / 8;
    uint32_t stored, mine = 0; /* bit r: the element of row r is in the shard */
    const float encode_scale = gmm__shard_encode_scale(s, 1, member, row, col, &stored);
    uint64_t codes = 0;
    int32_t r;
    for (r = 0; r < rows; r++) {
        const int64_t e = first + r * s->cols;
        if (e < 0 || e >= s->length) continue;
        mine |= 1u << r;
        codes |= (uint64_t)gmm_encode_small(v.dtype, gmm__fmul(gmm__shard_value(s, e), encode_scale)) << r * bits;
    }
    if (mine == (1u << GMM__SHARD_STRIP) - 1 && !((uintptr_t)dst & (uintptr_t)(bits - 1))) {
        if (bits == 8) *(uint64_t *)(void *)dst = codes;
        else *(uint32_t *)(void *)dst = (uint32_t)codes;
        return;
    }
    for (r = 0; r < rows; r++) {
        const uint8_t code = (uint8_t)(codes >> r * bits);
        if (!(mine >> r & 1)) continue;
        if (bits == 8) dst[r] = code;
        else dst[r / 2] = (uint8_t)((dst[r / 2] & (r & 1 ? 0x0F : 0xF0)) | (code & 15) << (r & 1 ? 4 : 0));
    }
}
/* The codes of a copy are stored in parts [*begin, *end). */
GMM__HD void gmm__shard_parts(const gmm__shard_args *s, int columnwise, int64_t *begin, int64_t *end) {
    const int64_t last = s->start + s->length - 1, size = s->rows * s->cols;
    *begin = *end = 0;
    if (s->length == 0) return;
    if (gmm__shard_transposed(s, columnwise)) {
        const int64_t strips = gmm__shard_strips(s);
        *begin = (s->start / size * strips + s->start % size / s->cols / GMM__SHARD_STRIP) * s->cols;
        *end = (last / size * strips + last % size / s->cols / GMM__SHARD_STRIP + 1) * s->cols;
    } else {
        *begin = s->start / 2;
        *end = last / 2 + 1;
    }
}
GMM__HD void gmm__shard_store_part(const gmm__shard_args *s, int columnwise, int64_t i) {
    if (gmm__shard_transposed(s, columnwise)) gmm__shard_store_column(s, i);
    else gmm__shard_store_pair(s, columnwise, i);
}

