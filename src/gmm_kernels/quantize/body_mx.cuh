/* ======================================================================= Bodies per source: MX32, whole vectors === */

#elif GMM__BODY == 15
#if !defined(GMM__TAG) || !defined(GMM__SOURCE)
#error "gmm: this body needs GMM__TAG and GMM__SOURCE"
#endif
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)
#define GMM__CFG(stem) GMM__CAT(stem##_, GMM__SOURCE)
#define GMM__WIDE GMM__CFG(gmm__wide)
#define GMM__ROW_WORDS (64 / GMM__WIDE) /* maxima of sixteen rows; two in a word where elements have 16 bits */

/* Both copies of 128 rows by 32 GMM__WIDE columns. A warp takes 32 rows by 16 GMM__WIDE columns and waits for no other:
   a lane has sixteen rows, so that sixteen lanes write whole lines of memory at once. 32 / GMM__WIDE lanes share a
   block of a row, two lanes one of a column, and each makes the scales of its part of them. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_BLOCK, 2)
GMM__NAME(gmm_cast)(const __grid_constant__ gmm__quant_args a) {
    const int32_t lane = gmm__lane(), warp = gmm__warp(), q = lane >> 4, c = lane & 15;
    const int32_t top = warp % 4 * 32, row0 = top + 16 * q;
    const int32_t rowwise = a.rowwise.dtype != GMM_NONE, columnwise = a.columnwise.dtype != GMM_NONE;
    const int32_t e5m2 = a.format.dtype == GMM_E5M2, square = a.format.square;
    const float inverse = gmm_f32_from_bits(e5m2 ? 0x37924925u : 0x3B124925u); /* of the largest */
    int32_t strip;
    if (a.skip && *a.skip) return;
    for (strip = (int32_t)blockIdx.y;; strip += (int32_t)gridDim.y) {
        const gmm_warp_split split = gmm__vec_split(&a); /* again, so that registers are free in between */
        uint32_t x[16][4], most = 0, mine, other, four[4];
        int32_t c0, i, j, k;
        if (strip >= split.total) break;
        const gmm__vec_strip p = gmm__vec_strip_of(&a, &split, strip, GMM__WIDE / 4, &c0);
        const int32_t cols = (int32_t)a.cols, live = p.m - row0, reach = a.grouped ? (p.rows + 127) & ~127 : p.rows;
        const int32_t row_along = (cols + 127) / 128 * 4, col_along = (reach + 127) / 128 * 4;
        const int32_t lines = (cols + 127) & ~127, left = c0 + warp / 4 * 16 * GMM__WIDE, col = left + GMM__WIDE * c;
        GMM__CFG(gmm__vec_load16)(&a, &p, row0, col, x);
        if (rowwise || square) {
            uint32_t row[GMM__ROW_WORDS];
#pragma unroll
            for (i = 0; i < 16; i += 16 / GMM__ROW_WORDS) {
                uint32_t far = x[i][0];
#pragma unroll
                for (k = 1; k < 4; k++) far = GMM__CFG(gmm__word_far)(far, x[i][k]);
                if (GMM__WIDE == 8) {
                    uint32_t next = x[i + 1][0];
#pragma unroll
                    for (k = 1; k < 4; k++) next = GMM__CFG(gmm__word_far)(next, x[i + 1][k]);
                    far = GMM__CFG(gmm__word_far)(__byte_perm(far, next, 0x5410), __byte_perm(far, next, 0x7632));
                }
                row[i * GMM__ROW_WORDS / 16] = far;
            }
            if (square) {
                most = row[0];
#pragma unroll
                for (i = 1; i < GMM__ROW_WORDS; i++) most = GMM__CFG(gmm__word_far)(most, row[i]);
                if (GMM__WIDE == 8) most = GMM__CFG(gmm__word_far)(most, __byte_perm(most, 0, 0x1032));
#pragma unroll
                for (i = 1; i < 32; i = i == 16 / GMM__WIDE ? 16 : 2 * i)
                    most = GMM__CFG(gmm__word_far)(most, __shfl_xor_sync(0xFFFFFFFFu, most, i));
                most = GMM__CFG(gmm__word_max)(0, most);
#pragma unroll
                for (i = 0; i < GMM__ROW_WORDS; i++) row[i] = GMM__CFG(gmm__vec_uniform_max)(most, i, p.m - row0);
            }
            /* lanes keep halves until they have two words */
#pragma unroll
            for (k = GMM__ROW_WORDS / 2; k >= 2; k >>= 1)
#pragma unroll
                for (i = 0; i < GMM__ROW_WORDS / 2; i++)
                    if (i < k) {
                        const int32_t near = GMM__ROW_WORDS / 2 / k, second = c & near;
                        const uint32_t keep = second ? row[i + k] : row[i];
                        other = __shfl_xor_sync(0xFFFFFFFFu, second ? row[i] : row[i + k], near);
                        row[i] = GMM__CFG(gmm__word_far)(keep, other);
                    }
            row[0] = GMM__CFG(gmm__word_max)(0, row[0]);
            row[1] = GMM__CFG(gmm__word_max)(0, row[1]);
            mine = gmm__vec_mx_scale2(GMM__CFG(gmm__word_value)(row, 0), GMM__CFG(gmm__word_value)(row, 1), inverse);
            if (GMM__WIDE == 8)
                mine |= gmm__vec_mx_scale2(GMM__CFG(gmm__word_value)(row, 2), GMM__CFG(gmm__word_value)(row, 3),
                                       inverse) << 16;
        }
        if (rowwise) { /* the block's scales of four rows are two lanes' for F32 */
            uint8_t *scale = gmm__vec_scales(&a.rowwise, a.scale_step[0], p.unit) +
                             (a.grouped ? (int64_t)p.start * row_along : 0);
            const int32_t l = row0 + 8 * (c & 1) + 2 * (c & 2) + (c >> 1 & 2) + (c >> 3);
            uint32_t next;
            other = __shfl_xor_sync(0xFFFFFFFFu, mine, 4);
            four[0] = GMM__WIDE == 8 ? mine : c & 4 ? other | mine << 16 : mine | other << 16;
            /* bytes of rows become those of blocks: four of one row, or two */
            if (GMM__WIDE == 8) mine = __byte_perm(mine, other, c & 4 ? 0x3726 : 0x5140);
            other = __shfl_xor_sync(0xFFFFFFFFu, mine, 8);
            if (GMM__WIDE == 8)
                mine = __byte_perm(mine, other, c & 8 ? 0x3276 : 0x5410);
            if (GMM__WIDE == 8)
                gmm__vec_store_scales4(scale, a.rowwise.scale_order, p.row, left / 32, row_along, l, 0, mine);
            else if (left / 32 < row_along)
                *(uint16_t *)(void *)(scale + (a.rowwise.scale_order == GMM_SCALES_SWIZZLED
                                                   ? gmm_swizzle_offset(p.row + l, left / 32, row_along)
                                                   : (int64_t)(p.row + l) * row_along + left / 32)) =
                    (uint16_t)__byte_perm(mine, other, c & 8 ? 0x4415 : 0x4440);
            other = __shfl_xor_sync(0xFFFFFFFFu, four[0], 2);
            four[1] = c & 2 ? four[0] : other;
            four[0] = c & 2 ? other : four[0];
            other = __shfl_xor_sync(0xFFFFFFFFu, four[0], 1);
            next = __shfl_xor_sync(0xFFFFFFFFu, four[1], 1);
            four[2] = c & 1 ? four[0] : other;
            four[3] = c & 1 ? four[1] : next;
            four[0] = c & 1 ? other : four[0];
            four[1] = c & 1 ? next : four[1];
        }
        if (rowwise && col < cols) {
            uint8_t *to = gmm__vec_data(&a.rowwise, a.step[0], p.unit) +
                          (p.first + p.row + row0) * a.rowwise.ld + col;
#pragma unroll
            for (i = 0; i < 16; i++, to += a.rowwise.ld) {
                const float by = gmm__vec_mx_reciprocal(four, i);
                float v[GMM__WIDE];
#pragma unroll
                for (j = 0; j < GMM__WIDE; j++) v[j] = gmm__fmul(GMM__CFG(gmm__word_value)(x[i], j), by);
                if (i < live) GMM__CFG(gmm__vec_store_codes)(to, e5m2, v);
            }
        }
        if (columnwise) {
            const int32_t line = col + GMM__WIDE / 2 * q, block = (p.row + top) / 32; /* of the lane's half */
            uint8_t *scale = gmm__vec_scales(&a.columnwise, a.scale_step[1], p.unit) +
                             (a.grouped ? (int64_t)(p.start / 32) * lines : 0);
            uint32_t far[4];
#pragma unroll
            for (k = 0; k < 4; k++) {
                far[k] = x[0][k];
#pragma unroll
                for (i = 1; i < 16; i++) far[k] = GMM__CFG(gmm__word_far)(far[k], x[i][k]);
            }
#pragma unroll
            for (k = 0; k < 2; k++) {
                const uint32_t keep = q ? far[k + 2] : far[k];
                other = __shfl_xor_sync(0xFFFFFFFFu, q ? far[k] : far[k + 2], 16);
                other = GMM__CFG(gmm__word_max)(0, GMM__CFG(gmm__word_far)(keep, other));
                far[k] = square ? col < cols ? most : 0 : other;
            }
            mine = gmm__vec_mx_scale2(GMM__CFG(gmm__word_value)(far, 0), GMM__CFG(gmm__word_value)(far, 1), inverse);
            if (GMM__WIDE == 8)
                mine |= gmm__vec_mx_scale2(GMM__CFG(gmm__word_value)(far, 2), GMM__CFG(gmm__word_value)(far, 3),
                                       inverse) << 16;
            if (line < lines && a.columnwise.scale_order == GMM_SCALES_SWIZZLED) {
                scale += gmm_swizzle_offset(line, block, col_along);
#pragma unroll
                for (j = 0; j < GMM__WIDE / 2; j++) scale[16 * j] = (uint8_t)(mine >> 8 * j);
            } else if (line < lines) {
                scale += (int64_t)block * lines + line;
                if (GMM__WIDE == 8) gmm_st_global_b32(scale, mine);
                else *(uint16_t *)(void *)scale = (uint16_t)mine;
            }
            other = __shfl_xor_sync(0xFFFFFFFFu, mine, 16);
            four[0] = q ? other : mine;
            four[1] = q ? mine : other;
            if (GMM__WIDE == 4) four[0] |= four[1] << 16;
        }
        if (columnwise && col < cols) { /* in the order of the source */
            uint8_t *to = gmm__vec_data(&a.columnwise, a.step[1], p.unit) +
                          (p.first + p.row + row0) * a.columnwise.ld + col;
            float by[GMM__WIDE];
#pragma unroll
            for (j = 0; j < GMM__WIDE; j++) by[j] = gmm__vec_mx_reciprocal(four, j);
#pragma unroll
            for (i = 0; i < 16; i++, to += a.columnwise.ld) {
                float v[GMM__WIDE];
#pragma unroll
                for (j = 0; j < GMM__WIDE; j++) v[j] = gmm__fmul(GMM__CFG(gmm__word_value)(x[i], j), by[j]);
                if (i < live) GMM__CFG(gmm__vec_store_codes)(to, e5m2, v);
            }
        }
    }
}

#undef GMM__ROW_WORDS
#undef GMM__WIDE
#undef GMM__CFG
#undef GMM__NAME
#undef GMM__TAG
#undef GMM__SOURCE
#endif

