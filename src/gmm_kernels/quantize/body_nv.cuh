/* =========================================================================== Bodies per source: vectorized NV16 === */

#elif GMM__BODY == 14
#ifndef GMM__ROW
#error "gmm: this body needs GMM__ROW"
#endif
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__WORDS (GMM__SOURCE == GMM_F32 ? 8 : 4)
#define GMM__HADAMARD GMM__COLUMN(3, GMM__ROW)
#define GMM__HALF_WORDS (GMM__WORDS / 2)

/* NV16 in both directions from tiles that are loaded once. Two lanes share a block; each computes the scales of half
   of the blocks of both. Scales are bytes, which index a table of all encode scales that the unit can have.
   GMM__HADAMARD (BF16): the columnwise copy is transformed, or codes are rounded stochastically; a block of a column
   then lies in one lane. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_BLOCK, GMM__WORDS == 4 && !GMM__HADAMARD ? 3 : 2)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ float encodes[2][GMM_TILE]; /* by scale byte; entry 127: factor of block amaxes */
    __shared__ __align__(16) uint8_t codes[GMM__NV_CODES];
    __shared__ __align__(16) uint8_t scales[GMM_TILE * GMM_TILE_BLOCKS]; /* scales of the columnwise copy */
    const int32_t lane = gmm__lane(), warp = gmm__warp(), lane_row = lane >> 3, lane_col = lane & 7;
    const int32_t row0 = warp % 4 * GMM__VEC_WARP_ROWS + 8 * lane_row;
    const int32_t col0 = warp / 4 * GMM__VEC_WARP_COLS + 8 * lane_col;
    /* whether this is the right lane of the two of a row's block, and the lower lane of the two of a column's block */
    const int32_t right = lane_col & 1, lower = lane_row & 1;
    const int32_t rowwise = a.rowwise.dtype != GMM_NONE, columnwise = a.columnwise.dtype != GMM_NONE;
    const int32_t separate_amax = columnwise && a.amax[1] != a.amax[0];
    const gmm_format *f = &a.format;
    int32_t strip;
    if (a.skip && *a.skip) return;
    gmm__quant_scales(&a, ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * GMM__QUANT_BLOCK + threadIdx.x,
                      (int64_t)gridDim.x * gridDim.y * GMM__QUANT_BLOCK, 0);
    for (strip = (int32_t)blockIdx.y;; strip += (int32_t)gridDim.y) {
        /* recomputed for each strip, so that it takes no registers in the loop body */
        const gmm_warp_split split = gmm__vec_split(&a);
        uint32_t x[8][8];
        int32_t c0, i, j, k;
        if (strip >= split.total) break;
        const gmm__vec_strip p = gmm__vec_strip_of(&a, &split, strip, GMM__VEC_TILES, &c0);
        const int32_t padded_rows = a.grouped ? (p.rows + 127) & ~127 : p.rows, valid_rows = p.m - row0;
        const int32_t cols = (int32_t)a.cols;
        const int32_t row_along = ((cols + 63) >> 6) * 4, col_along = ((padded_rows + 63) >> 6) * 4;
        const int64_t row_pitch = a.rowwise.ld / 2, col_pitch = a.columnwise.ld / 2;
        const int32_t end = cols - c0 < GMM__VEC_TILES * GMM_TILE ? cols : c0 + GMM__VEC_TILES * GMM_TILE;
        gmm__vec_load(GMM__SOURCE, &a, &p, row0, col0, c0, cols - c0, x);
        for (k = 0; k <= separate_amax; k++) {
            const gmm_nv_global g = gmm_nv_global_of(a.amax[k][p.unit], f->e4m3_256 ? 256.0f : 448.0f);
            const int32_t thread = gmm_tid_x();
            if (thread < GMM_TILE) encodes[k][thread] = thread < 127 ? gmm_nv_encode(&g, (uint8_t)thread) : g.mult;
        }
        __syncthreads();
        for (; c0 < end; c0 += GMM_TILE) {
            const int32_t valid_cols = col0 < cols - c0;
            const float *const col_encodes = encodes[separate_amax];
            uint32_t has_nan = 0;
#if !GMM__HADAMARD
            uint32_t nibbles[8], maximum = 0;
#endif
            if (rowwise || !GMM__HADAMARD) { /* maxima of rows */
                uint32_t row[8], scales4[2], lane_scales, other;
                float amax[4];
#pragma unroll
                for (i = 0; i < 8; i++) {
                    row[i] = 0;
#pragma unroll
                    for (k = 0; k < GMM__WORDS; k++) row[i] = gmm__word_max_nan(GMM__SOURCE, row[i], x[i][k]);
                    row[i] = gmm__word_fold(GMM__SOURCE, row[i]);
                    has_nan = row[i] > has_nan ? row[i] : has_nan;
                }
                has_nan = has_nan > 0x7F800000u; /* a value is NaN */
                if (has_nan)
#pragma unroll
                    for (i = 0; i < 8; i++) {
                        row[i] = 0;
#pragma unroll
                        for (k = 0; k < GMM__WORDS; k++) {
                            row[i] = gmm__word_max(GMM__SOURCE, row[i], x[i][k]);
#if GMM__HADAMARD
                            x[i][k] = gmm__vec_positive_nan(x[i][k]);
#endif
                        }
                        row[i] = gmm__word_fold(GMM__SOURCE, row[i]);
                    }
#if !GMM__HADAMARD
                if (f->square) {
#pragma unroll
                    for (i = 0; i < 8; i++) maximum = maximum > row[i] ? maximum : row[i];
                    maximum = gmm__quant_block_max(maximum, 2);
                    other = __shfl_xor_sync(0xFFFFFFFFu, maximum, 8);
                    maximum = maximum > other ? maximum : other;
                    /* rows beyond the last one have no scales */
#pragma unroll
                    for (i = 0; i < 8; i++) row[i] = i < valid_rows ? maximum : 0;
                }
#endif
#pragma unroll
                for (i = 0; i < 4; i++) {
                    const uint32_t own = right ? row[i + 4] : row[i];
                    other = __shfl_xor_sync(0xFFFFFFFFu, right ? row[i] : row[i + 4], 1);
                    amax[i] = gmm_f32_from_bits(own > other ? own : other);
                }
                lane_scales = gmm__vec_nv_scale4(amax, encodes[0], !GMM__HADAMARD);
                other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 1);
                scales4[0] = right ? other : lane_scales;
                scales4[1] = right ? lane_scales : other;
#if !GMM__HADAMARD
                if (f->square) { /* both copies hold the same codes */
                    const float encode_scale = gmm__vec_nv_encode(encodes[0], scales4, 0);
#pragma unroll
                    for (i = 0; i < 8; i++) {
                        float v[8];
#pragma unroll
                        for (j = 0; j < 8; j++) v[j] = gmm__word_value(GMM__SOURCE, x[i], j);
                        nibbles[i] = gmm__vec_e2m1x8(v, encode_scale, 0);
                    }
                }
#endif
                if (rowwise) { /* bytes are transposed: a lane receives the scales of four adjacent blocks of a row */
                    uint8_t *dst = gmm__vec_scales(&a.rowwise, a.scale_step[0], p.unit) +
                                  (a.grouped ? (int64_t)p.padded_row * row_along : 0);
                    lane_scales &= 0x7F7F7F7Fu;
                    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 2);
                    lane_scales = __byte_perm(lane_scales, other, lane_col & 2 ? 0x3715 : 0x6240);
                    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 4);
                    lane_scales = __byte_perm(lane_scales, other, lane_col & 4 ? 0x3276 : 0x5410);
                    gmm__vec_store_scales4(dst, a.rowwise.scale_order, p.row, c0 / 16, row_along,
                                           row0 + 4 * right + (lane_col >> 1), col0 >> 6 << 2, lane_scales);
                }
#if GMM__HADAMARD
                /* rows i and i + 4 at once: each of a block's two lanes draws the random bits of one row for both */
                if (rowwise) {
                    uint8_t *dst = gmm__vec_data(&a.rowwise, a.step[0], p.unit) + (c0 + col0) / 2 +
                                  (p.source_row + p.row + row0) * row_pitch;
                    const int64_t blocks_per_row = (cols + 15) >> 4;
                    const int64_t block = (p.row + row0 + 4 * right) * blocks_per_row + ((c0 + col0) >> 4);
#pragma unroll
                    for (i = 0; i < 4; i++, dst += row_pitch) {
                        uint32_t draw[4], random[2][2];
                        if (f->stochastic) {
                            gmm_draw_block(a.random[0], a.random[1], a.first_group + p.unit, block + i * blocks_per_row,
                                           GMM_ROWWISE, draw);
#pragma unroll
                            for (k = 0; k < 2; k++) {
                                other = __shfl_xor_sync(0xFFFFFFFFu, right ? draw[k] : draw[k + 2], 1);
                                random[0][k] = right ? other : draw[k];
                                random[1][k] = right ? draw[k + 2] : other;
                            }
                        }
#pragma unroll
                        for (k = 0; k < 2; k++) {
                            const float encode_scale = gmm__vec_nv_encode(encodes[0], scales4, i + 4 * k);
                            uint32_t code;
                            float v[8];
#pragma unroll
                            for (j = 0; j < 8; j++) v[j] = gmm__word_value(GMM_BF16, x[i + 4 * k], j);
                            code = f->stochastic ? gmm__vec_e2m1x8_random(v, encode_scale, random[k])
                                                 : gmm__vec_e2m1x8(v, encode_scale, 1);
                            if (valid_cols && i + 4 * k < valid_rows) gmm_st_global_b32(dst + 4 * k * row_pitch, code);
                        }
                    }
                }
#else
                if (rowwise && valid_cols) {
                    uint8_t *dst = gmm__vec_data(&a.rowwise, a.step[0], p.unit) + (c0 + col0) / 2 +
                                  (p.source_row + p.row + row0) * row_pitch;
#pragma unroll
                    for (i = 0; i < 8; i++, dst += row_pitch) {
                        const float encode_scale = gmm__vec_nv_encode(encodes[0], scales4, i);
                        float v[8];
                        if (f->square) {
                            if (i < valid_rows) gmm_st_global_b32(dst, nibbles[i]);
                            continue;
                        }
#pragma unroll
                        for (j = 0; j < 8; j++) v[j] = gmm__word_value(GMM__SOURCE, x[i], j);
                        if (i < valid_rows) gmm_st_global_b32(dst, gmm__vec_e2m1x8(v, encode_scale, 0));
                    }
                    /* the scalar codec encodes the values again, from device memory */
                    if (has_nan | ((scales4[0] | scales4[1]) & 0x80u)) {
                        dst -= 8 * row_pitch;
#pragma unroll 1
                        for (k = 0; k < 64 && k >> 3 < valid_rows; k += 2) {
                            const float encode_scale = gmm__vec_nv_encode(encodes[0], scales4, k >> 3);
                            uint32_t byte = 0;
#pragma unroll 1
                            for (j = 0; j < 2; j++) {
                                const float v = gmm__vec_reload(GMM__SOURCE, &a, &p, row0 + (k >> 3),
                                                                          c0 + col0 + (k & 7) + j);
                                byte |= (uint32_t)gmm_f32_to_e2m1(gmm__fmul(v, encode_scale)) << 4 * j;
                            }
                            dst[(k >> 3) * row_pitch + (k & 7) / 2] = (uint8_t)byte;
                        }
                    }
                }
#endif
            }
            if (columnwise) {
                uint8_t *smem = codes + col0 * GMM__NV_COLUMN + (col0 >> 3) * 16;
                uint32_t lane_scales;
                float amax[4];
#if GMM__HADAMARD
                uint32_t y[16][2];
                if (f->hadamard) gmm__vec_flip_signs(x, (uint32_t)f->hadamard >> 8 * lower);
                gmm__vec_gather16(x, lower, y);
                smem += 4 * lower * GMM__NV_COLUMN + (row0 & ~15) / 2;
                lane_scales = 0;
#pragma unroll
                for (j = 0; j < 4; j++) {
                    uint32_t column[8], draw[4], dst[2], maximum = 0;
                    float encode_scale;
                    gmm__vec_column16(y, j, f->hadamard, column);
#pragma unroll
                    for (i = 0; i < 8; i++) maximum = gmm__word_max(GMM_BF16, maximum, column[i]);
                    amax[0] = gmm_f32_from_bits(gmm__word_fold(GMM_BF16, maximum));
                    amax[1] = amax[2] = amax[3] = 0.0f;
                    k = (int32_t)gmm__vec_nv_scale4(amax, col_encodes, 0);
                    encode_scale = col_encodes[k];
                    lane_scales |= (uint32_t)k << 8 * j;
                    if (f->stochastic)
                        gmm_draw_block(a.random[0], a.random[1], a.first_group + p.unit,
                                       (int64_t)(c0 + col0 + 4 * lower + j) * ((p.rows + 15) >> 4) +
                                       ((p.row + row0) >> 4), GMM_COLUMNWISE, draw);
#pragma unroll
                    for (k = 0; k < 2; k++) {
                        float v[8];
#pragma unroll
                        for (i = 0; i < 8; i++) v[i] = gmm__word_value(GMM_BF16, column + 4 * k, i);
                        dst[k] = f->stochastic ? gmm__vec_e2m1x8_random(v, encode_scale, draw + 2 * k)
                                              : gmm__vec_e2m1x8(v, encode_scale, 1);
                    }
                    *(uint2 *)(void *)(smem + j * GMM__NV_COLUMN) = make_uint2(dst[0], dst[1]);
                }
#else
                uint32_t col[GMM__WORDS], scales4[2], other;
#pragma unroll
                for (k = 0; k < GMM__WORDS; k++) {
                    col[k] = 0;
#pragma unroll
                    for (i = 0; i < 8; i++) col[k] = gmm__word_max(GMM__SOURCE, col[k], x[i][k]);
                }
#pragma unroll
                for (k = 0; k < GMM__HALF_WORDS; k++) {
                    const uint32_t sent = lower ? col[k] : col[k + GMM__HALF_WORDS];
                    col[k] = gmm__word_max(GMM__SOURCE, lower ? col[k + GMM__HALF_WORDS] : col[k],
                                                     __shfl_xor_sync(0xFFFFFFFFu, sent, 8));
                }
#pragma unroll
                for (j = 0; j < 4; j++)
                    amax[j] = f->square ? gmm_f32_from_bits(valid_cols ? maximum : 0)
                                        : gmm__word_value(GMM__SOURCE, col, j);
                lane_scales = gmm__vec_nv_scale4(amax, col_encodes, 1);
                other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 8);
                scales4[0] = lower ? other : lane_scales;
                scales4[1] = lower ? lane_scales : other;
                smem += row0 / 2;
                if (f->square) gmm__vec_transpose_nibbles(nibbles);
#pragma unroll
                for (j = 0; j < 8; j++) {
                    const float encode_scale = gmm__vec_nv_encode(col_encodes, scales4, j);
                    float v[8];
                    if (f->square) {
                        *(uint32_t *)(void *)(smem + j * GMM__NV_COLUMN) = nibbles[j];
                        continue;
                    }
#pragma unroll
                    for (i = 0; i < 8; i++) v[i] = gmm__word_value(GMM__SOURCE, x[i], j);
                    *(uint32_t *)(void *)(smem + j * GMM__NV_COLUMN) = gmm__vec_e2m1x8(v, encode_scale, 0);
                }
                if (has_nan | ((scales4[0] | scales4[1]) & 0x80u))
#pragma unroll 1
                    for (k = 0; k < 64; k += 2) {
                        const float encode_scale = gmm__vec_nv_encode(col_encodes, scales4, k >> 3);
                        uint32_t byte = 0;
#pragma unroll 1
                        for (j = 0; j < 2; j++)
                            if ((k & 7) + j < valid_rows && valid_cols) {
                                const float v = gmm__vec_reload(GMM__SOURCE, &a, &p, row0 + (k & 7) + j,
                                                                          c0 + col0 + (k >> 3));
                                byte |= (uint32_t)gmm_f32_to_e2m1(gmm__fmul(v, encode_scale)) << 4 * j;
                            }
                        smem[(k >> 3) * GMM__NV_COLUMN + (k & 7) / 2] = (uint8_t)byte;
                    }
                lane_scales &= 0x7F7F7F7Fu;
#endif
#pragma unroll
                for (j = 0; j < 4; j++)
                    scales[(col0 + 4 * lower + j) * GMM_TILE_BLOCKS + (row0 >> 4)] = (uint8_t)(lane_scales >> 8 * j);
            }
            if (c0 + GMM_TILE < end) /* the next tile is loaded while codes are stored */
                gmm__vec_load(GMM__SOURCE, &a, &p, row0, col0, c0 + GMM_TILE, cols - c0 - GMM_TILE, x);
            if (columnwise) {
                /* computed here, so that they take no registers before */
                const int32_t thread = gmm_tid_x(), chunks = GMM__NV_COLUMN / 16;
                const int32_t chunk = thread % chunks, first = thread / chunks, scale_col = thread >> 1;
                const int32_t block0 = 4 * (thread & 1);
                const int64_t begin = (a.grouped ? p.padded_row : 0) + p.row;
                const int64_t padded_cols = (cols + 127) & ~127;
                uint8_t *dst = gmm__vec_data(&a.columnwise, a.step[1], p.unit) + begin / 2 + chunk * 16 +
                              (c0 + first) * col_pitch;
                uint8_t *scale = gmm__vec_scales(&a.columnwise, a.scale_step[1], p.unit) +
                                 (a.grouped ? (int64_t)(p.padded_row / 16) * padded_cols : 0);
                __syncthreads();
                gmm__vec_store_scales4(scale, a.columnwise.scale_order, c0, p.row / 16, col_along, scale_col, block0,
                                       *(const uint32_t *)(const void *)(scales + scale_col * GMM_TILE_BLOCKS +
                                                                         block0));
                if (chunk * 32 < (a.grouped ? (int32_t)GMM_TILE : p.m))
#pragma unroll
                    for (k = first; k < GMM_TILE; k += GMM__QUANT_BLOCK / chunks,
                         dst += GMM__QUANT_BLOCK / chunks * col_pitch)
                        if (k < cols - c0)
                            gmm_st_global_v4_b32(dst, *(const uint4 *)(const void *)(codes + k * GMM__NV_COLUMN +
                                                                                     (k >> 3) * 16 + chunk * 16));
                __syncthreads();
            }
        }
        __syncthreads();
    }
}

#undef GMM__HALF_WORDS
#undef GMM__WORDS
#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__HADAMARD
#undef GMM__ROW

