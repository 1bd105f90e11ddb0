/* =========================================================================== Bodies per source: vectorized MX32 === */

#elif GMM__BODY == 15
#ifndef GMM__ROW
#error "gmm: this body needs GMM__ROW"
#endif
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__WORDS (GMM__SOURCE == GMM_F32 ? 8 : 4)
#define GMM__ELEMS16 (GMM__SOURCE == GMM_F32 ? 4 : 8)
/* words of the maxima of sixteen rows; elements of 16 bits have two maxima per word */
#define GMM__ROW_WORDS (64 / GMM__ELEMS16)

/* MX32 in both directions from one load. A CTA quantizes 128 rows by 32 GMM__ELEMS16 columns, a warp 32 rows by 16
   GMM__ELEMS16 columns of them without synchronization with other warps. A lane holds sixteen rows of sixteen bytes,
   so that sixteen lanes write complete lines of memory. 32 / GMM__ELEMS16 lanes share a block of a row and two lanes a
   block of a column; each computes the scales of its part of the blocks. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_BLOCK, 2)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    const int32_t lane = gmm__lane(), warp = gmm__warp(), lane_row = lane >> 4, lane_col = lane & 15;
    const int32_t warp_row = warp % 4 * 32, row0 = warp_row + 16 * lane_row;
    const int32_t rowwise = a.rowwise.dtype != GMM_NONE, columnwise = a.columnwise.dtype != GMM_NONE;
    const int32_t e5m2 = a.format.dtype == GMM_E5M2, square = a.format.square;
    const float inverse = gmm_f32_from_bits(e5m2 ? 0x37924925u : 0x3B124925u); /* reciprocal of the largest value */
    int32_t strip;
    if (a.skip && *a.skip) return;
    for (strip = (int32_t)blockIdx.y;; strip += (int32_t)gridDim.y) {
        /* recomputed for each strip, so that it takes no registers in the loop body */
        const gmm_warp_split split = gmm__vec_split(&a);
        uint32_t x[16][4], square_max = 0, lane_scales, other, scales4[4];
        int32_t c0, i, j, k;
        if (strip >= split.total) break;
        const gmm__vec_strip p = gmm__vec_strip_of(&a, &split, strip, GMM__ELEMS16 / 4, &c0);
        const int32_t cols = (int32_t)a.cols, padded_cols = (cols + 127) & ~127, valid_rows = p.m - row0;
        const int32_t padded_rows = a.grouped ? (p.rows + 127) & ~127 : p.rows;
        const int32_t row_along = (cols + 127) / 128 * 4, col_along = (padded_rows + 127) / 128 * 4;
        const int32_t warp_col = c0 + warp / 4 * 16 * GMM__ELEMS16, col = warp_col + GMM__ELEMS16 * lane_col;
        gmm__vec_load16(GMM__SOURCE, &a, &p, row0, col, x);
        if (rowwise || square) {
            uint32_t row[GMM__ROW_WORDS];
#pragma unroll
            for (i = 0; i < 16; i += 16 / GMM__ROW_WORDS) {
                uint32_t maximum = x[i][0];
#pragma unroll
                for (k = 1; k < 4; k++) maximum = gmm__word_max_signed(GMM__SOURCE, maximum, x[i][k]);
                if (GMM__ELEMS16 == 8) {
                    uint32_t maximum2 = x[i + 1][0];
#pragma unroll
                    for (k = 1; k < 4; k++) maximum2 = gmm__word_max_signed(GMM__SOURCE, maximum2, x[i + 1][k]);
                    maximum = gmm__word_max_signed(GMM__SOURCE, __byte_perm(maximum, maximum2, 0x5410),
                                                             __byte_perm(maximum, maximum2, 0x7632));
                }
                row[i * GMM__ROW_WORDS / 16] = maximum;
            }
            if (square) {
                square_max = row[0];
#pragma unroll
                for (i = 1; i < GMM__ROW_WORDS; i++) square_max = gmm__word_max_signed(GMM__SOURCE, square_max, row[i]);
                if (GMM__ELEMS16 == 8)
                    square_max = gmm__word_max_signed(GMM__SOURCE, square_max, __byte_perm(square_max, 0, 0x1032));
#pragma unroll
                for (i = 1; i < 32; i = i == 16 / GMM__ELEMS16 ? 16 : 2 * i)
                    square_max = gmm__word_max_signed(GMM__SOURCE, square_max,
                                                                __shfl_xor_sync(0xFFFFFFFFu, square_max, i));
                square_max = gmm__word_max(GMM__SOURCE, 0, square_max);
#pragma unroll
                for (i = 0; i < GMM__ROW_WORDS; i++) row[i] = gmm__vec_uniform_max(GMM__SOURCE, square_max, i, p.m - row0);
            }
            /* butterfly: each step halves the rows of a lane, until it has two words */
#pragma unroll
            for (k = GMM__ROW_WORDS / 2; k >= 2; k >>= 1)
#pragma unroll
                for (i = 0; i < GMM__ROW_WORDS / 2; i++)
                    if (i < k) {
                        const int32_t lane_stride = GMM__ROW_WORDS / 2 / k, upper = lane_col & lane_stride;
                        const uint32_t own = upper ? row[i + k] : row[i];
                        other = __shfl_xor_sync(0xFFFFFFFFu, upper ? row[i] : row[i + k], lane_stride);
                        row[i] = gmm__word_max_signed(GMM__SOURCE, own, other);
                    }
            row[0] = gmm__word_max(GMM__SOURCE, 0, row[0]);
            row[1] = gmm__word_max(GMM__SOURCE, 0, row[1]);
            lane_scales = gmm__vec_mx_scale2(gmm__word_value(GMM__SOURCE, row, 0), gmm__word_value(GMM__SOURCE, row, 1),
                                             inverse);
            if (GMM__ELEMS16 == 8)
                lane_scales |= gmm__vec_mx_scale2(gmm__word_value(GMM__SOURCE, row, 2), gmm__word_value(GMM__SOURCE, row, 3),
                                                  inverse) << 16;
        }
        if (rowwise) { /* with F32 the scales of a block of four rows are spread over two lanes */
            uint8_t *scale = gmm__vec_scales(&a.rowwise, a.scale_step[0], p.unit) +
                             (a.grouped ? (int64_t)p.padded_row * row_along : 0);
            const int32_t scale_row = row0 + 8 * (lane_col & 1) + 2 * (lane_col & 2) + (lane_col >> 1 & 2) +
                                      (lane_col >> 3);
            uint32_t other2;
            other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 4);
            scales4[0] = GMM__ELEMS16 == 8 ? lane_scales
                         : lane_col & 4    ? other | lane_scales << 16
                                           : lane_scales | other << 16;
            /* bytes are transposed: scales of several rows become scales of four (F32: two) adjacent blocks of a row */
            if (GMM__ELEMS16 == 8) lane_scales = __byte_perm(lane_scales, other, lane_col & 4 ? 0x3726 : 0x5140);
            other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 8);
            if (GMM__ELEMS16 == 8)
                lane_scales = __byte_perm(lane_scales, other, lane_col & 8 ? 0x3276 : 0x5410);
            if (GMM__ELEMS16 == 8)
                gmm__vec_store_scales4(scale, a.rowwise.scale_order, p.row, warp_col / 32, row_along, scale_row, 0,
                                       lane_scales);
            else if (warp_col / 32 < row_along)
                *(uint16_t *)(void *)(scale + (a.rowwise.scale_order == GMM_SCALES_SWIZZLED
                                               ? gmm_swizzle_offset(p.row + scale_row, warp_col / 32, row_along)
                                               : (int64_t)(p.row + scale_row) * row_along + warp_col / 32)) =
                    (uint16_t)__byte_perm(lane_scales, other, lane_col & 8 ? 0x4415 : 0x4440);
            other = __shfl_xor_sync(0xFFFFFFFFu, scales4[0], 2);
            scales4[1] = lane_col & 2 ? scales4[0] : other;
            scales4[0] = lane_col & 2 ? other : scales4[0];
            other = __shfl_xor_sync(0xFFFFFFFFu, scales4[0], 1);
            other2 = __shfl_xor_sync(0xFFFFFFFFu, scales4[1], 1);
            scales4[2] = lane_col & 1 ? scales4[0] : other;
            scales4[3] = lane_col & 1 ? scales4[1] : other2;
            scales4[0] = lane_col & 1 ? other : scales4[0];
            scales4[1] = lane_col & 1 ? other2 : scales4[1];
        }
        if (rowwise && col < cols) {
            uint8_t *dst = gmm__vec_data(&a.rowwise, a.step[0], p.unit) +
                          (p.source_row + p.row + row0) * a.rowwise.ld + col;
#pragma unroll
            for (i = 0; i < 16; i++, dst += a.rowwise.ld) {
                const float encode_scale = gmm__vec_mx_reciprocal(scales4, i);
                float v[GMM__ELEMS16];
#pragma unroll
                for (j = 0; j < GMM__ELEMS16; j++) v[j] = gmm__fmul(gmm__word_value(GMM__SOURCE, x[i], j), encode_scale);
                if (i < valid_rows) gmm__vec_store_codes(dst, e5m2, v, GMM__ELEMS16);
            }
        }
        if (columnwise) {
            /* first column whose scale the lane stores, and the block of its 32 rows */
            const int32_t scale_col = col + GMM__ELEMS16 / 2 * lane_row, block = (p.row + warp_row) / 32;
            uint8_t *scale = gmm__vec_scales(&a.columnwise, a.scale_step[1], p.unit) +
                             (a.grouped ? (int64_t)(p.padded_row / 32) * padded_cols : 0);
            uint32_t maximum[4];
#pragma unroll
            for (k = 0; k < 4; k++) {
                maximum[k] = x[0][k];
#pragma unroll
                for (i = 1; i < 16; i++) maximum[k] = gmm__word_max_signed(GMM__SOURCE, maximum[k], x[i][k]);
            }
#pragma unroll
            for (k = 0; k < 2; k++) {
                const uint32_t own = lane_row ? maximum[k + 2] : maximum[k];
                other = __shfl_xor_sync(0xFFFFFFFFu, lane_row ? maximum[k] : maximum[k + 2], 16);
                other = gmm__word_max(GMM__SOURCE, 0, gmm__word_max_signed(GMM__SOURCE, own, other));
                maximum[k] = square ? col < cols ? square_max : 0 : other;
            }
            lane_scales = gmm__vec_mx_scale2(gmm__word_value(GMM__SOURCE, maximum, 0),
                                             gmm__word_value(GMM__SOURCE, maximum, 1), inverse);
            if (GMM__ELEMS16 == 8)
                lane_scales |= gmm__vec_mx_scale2(gmm__word_value(GMM__SOURCE, maximum, 2),
                                                  gmm__word_value(GMM__SOURCE, maximum, 3),
                                                  inverse) << 16;
            if (scale_col < padded_cols && a.columnwise.scale_order == GMM_SCALES_SWIZZLED) {
                scale += gmm_swizzle_offset(scale_col, block, col_along);
#pragma unroll
                for (j = 0; j < GMM__ELEMS16 / 2; j++) scale[16 * j] = (uint8_t)(lane_scales >> 8 * j);
            } else if (scale_col < padded_cols) {
                scale += (int64_t)block * padded_cols + scale_col;
                if (GMM__ELEMS16 == 8) gmm_st_global_b32(scale, lane_scales);
                else *(uint16_t *)(void *)scale = (uint16_t)lane_scales;
            }
            other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 16);
            scales4[0] = lane_row ? other : lane_scales;
            scales4[1] = lane_row ? lane_scales : other;
            if (GMM__ELEMS16 == 4) scales4[0] |= scales4[1] << 16;
        }
        if (columnwise && col < cols) { /* codes in the order of the source */
            uint8_t *dst = gmm__vec_data(&a.columnwise, a.step[1], p.unit) +
                          (p.source_row + p.row + row0) * a.columnwise.ld + col;
            float encode_scale[GMM__ELEMS16];
#pragma unroll
            for (j = 0; j < GMM__ELEMS16; j++) encode_scale[j] = gmm__vec_mx_reciprocal(scales4, j);
#pragma unroll
            for (i = 0; i < 16; i++, dst += a.columnwise.ld) {
                float v[GMM__ELEMS16];
#pragma unroll
                for (j = 0; j < GMM__ELEMS16; j++)
                    v[j] = gmm__fmul(gmm__word_value(GMM__SOURCE, x[i], j), encode_scale[j]);
                if (i < valid_rows) gmm__vec_store_codes(dst, e5m2, v, GMM__ELEMS16);
            }
        }
    }
}

#undef GMM__ROW_WORDS
#undef GMM__ELEMS16
#undef GMM__WORDS
#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__ROW
#endif

