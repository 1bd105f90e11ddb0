/* ==================================================================== Bodies per source and scaling: vectorized === */

#elif GMM__BODY == 13
#ifndef GMM__ROW
#error "gmm: this body needs GMM__ROW"
#endif
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__WORDS (GMM__SOURCE == GMM_F32 ? 8 : 4)
#define GMM__SCALING GMM__COLUMN(3, GMM__ROW)
#define GMM__BLOCK_SCALED (GMM__SCALING == GMM_SCALING_1X128 || GMM__SCALING == GMM_SCALING_128X128)
/* stride of the maxima or scales of a row, which has two halves; odd, so that rows fall into different banks */
#define GMM__ROW_STEP 3
#define GMM__COL_STEP 5 /* stride of those of a column, which has four quarters */

/* FP8 with fp32 scales (GMM__SCALING) in both directions from a tile that is loaded once: maxima of blocks or given
   amaxes become scales, then rowwise codes are stored from registers and columnwise codes through shared memory. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_BLOCK, GMM__WORDS == 4 ? 3 : 2)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ float smem_scales[2][GMM__COL_STEP * GMM_TILE];
    __shared__ __align__(16) uint8_t codes[GMM__VEC_CODES];
    const int32_t thread = (int32_t)threadIdx.x, lane = gmm__lane(), warp = gmm__warp();
    const int32_t lane_row = lane >> 3, lane_col = lane & 7;
    const int32_t row0 = warp % 4 * GMM__VEC_WARP_ROWS + 8 * lane_row;
    const int32_t col0 = warp / 4 * GMM__VEC_WARP_COLS + 8 * lane_col;
    const int32_t rowwise = a.rowwise.dtype != GMM_NONE, columnwise = a.columnwise.dtype != GMM_NONE;
    const int32_t e5m2 = a.format.dtype == GMM_E5M2;
    const gmm_format *f = &a.format;
    const float qmax = e5m2 ? 57344.0f : 448.0f;
    const gmm_warp_split split = gmm__vec_split(&a);
    int32_t strip;
    if (a.skip && *a.skip) return;
    if (!GMM__BLOCK_SCALED)
        gmm__quant_scales(&a, ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * GMM__QUANT_BLOCK + thread,
                          (int64_t)gridDim.x * gridDim.y * GMM__QUANT_BLOCK, 0);
    for (strip = (int32_t)blockIdx.y; strip < split.total; strip += (int32_t)gridDim.y) {
        uint32_t x[8][8], maximum_bits = 0;
        float tile_scale = 1.0f;
        int32_t c0, i, j, k;
        const gmm__vec_strip p = gmm__vec_strip_of(&a, &split, strip, 1, &c0);
        const int32_t n = (int32_t)a.cols - c0;
        const int32_t padded_rows = a.grouped ? (p.rows + 127) & ~127 : p.rows;
        const int32_t valid_rows = p.m - row0;
        gmm__vec_load(GMM__SOURCE, &a, &p, row0, col0, c0, n, x);

        if (GMM__SCALING == GMM_SCALING_TENSOR) {
            tile_scale = f->delayed ? a.scale ? a.scale[p.unit] : 1.0f
                                    : gmm_scale_from_amax(a.amax[0][p.unit], qmax, gmm_dtype_largest(GMM_F32), f->eps,
                                                          f->pow2);
            if (a.record) {
#pragma unroll
                for (i = 0; i < 8; i++)
#pragma unroll
                    for (k = 0; k < GMM__WORDS; k++)
                        maximum_bits = gmm__word_max(GMM__SOURCE, maximum_bits, x[i][k]);
                maximum_bits = __reduce_max_sync(0xFFFFFFFFu, gmm__word_fold(GMM__SOURCE, maximum_bits));
                if (lane == 0) smem_scales[0][warp] = gmm_f32_from_bits(maximum_bits);
            }
        }
        if (GMM__SCALING == GMM_SCALING_ROW && thread < GMM_TILE && rowwise) {
            const int64_t row = (a.grouped ? p.source_row : (int64_t)p.unit * p.rows) + p.row + thread;
            const float scale = gmm_scale_from_amax(thread < p.m ? a.lines[row] : 0.0f, qmax,
                                                    gmm_dtype_largest(GMM_F32), f->eps, f->pow2);
            smem_scales[0][thread * GMM__ROW_STEP] = scale;
            if (c0 == 0 && thread < p.m) {
                uint8_t *dst = gmm__vec_scales(&a.rowwise, a.scale_step[0], p.unit);
                ((float *)(void *)dst)[(a.grouped ? p.source_row : 0) + p.row + thread] = gmm_scale_inverse(scale);
            }
        }
        if (GMM__SCALING == GMM_SCALING_ROW && thread >= GMM_TILE && columnwise) {
            const int32_t col = thread - GMM_TILE;
            smem_scales[1][col * GMM__COL_STEP] =
                gmm_scale_from_amax(col < n ? a.columns[p.unit * a.cols + c0 + col] : 0.0f, qmax,
                                    gmm_dtype_largest(GMM_F32), f->eps, f->pow2);
        }
        if (GMM__BLOCK_SCALED) { /* maxima of the parts of blocks */
            uint32_t row[8], col[GMM__WORDS], maximum = 0;
#pragma unroll
            for (k = 0; k < GMM__WORDS; k++) col[k] = 0;
#pragma unroll
            for (i = 0; i < 8; i++) {
                row[i] = 0;
#pragma unroll
                for (k = 0; k < GMM__WORDS; k++) {
                    row[i] = gmm__word_max(GMM__SOURCE, row[i], x[i][k]);
                    if (GMM__WORDS == 4) col[k] = gmm__word_max(GMM__SOURCE, col[k], x[i][k]);
                }
                row[i] = gmm__word_fold(GMM__SOURCE, row[i]);
            }
            if (GMM__SCALING == GMM_SCALING_128X128) {
#pragma unroll
                for (i = 0; i < 8; i++) maximum = maximum > row[i] ? maximum : row[i];
                maximum = __reduce_max_sync(0xFFFFFFFFu, maximum);
                if (lane == 0) smem_scales[0][warp] = gmm_f32_from_bits(maximum);
            } else {
                if (rowwise) {
#pragma unroll
                    for (i = 0; i < 8; i++) {
                        const uint32_t bits = gmm__quant_block_max(row[i], 8);
                        if (lane_col == 0)
                            smem_scales[0][(row0 + i) * GMM__ROW_STEP + (col0 >> 6)] = gmm_f32_from_bits(bits);
                    }
                }
                if (columnwise) {
#pragma unroll
                    for (k = 0; k < GMM__WORDS; k++) {
                        /* for 16-bit sources above, where F32 sources would spill registers */
#pragma unroll
                        for (i = 0; i < 8 && GMM__WORDS != 4; i++)
                            col[k] = gmm__word_max(GMM__SOURCE, col[k], x[i][k]);
#pragma unroll
                        for (i = 8; i < 32; i <<= 1)
                            col[k] = gmm__word_max(GMM__SOURCE, col[k], __shfl_xor_sync(0xFFFFFFFFu, col[k], i));
                    }
                    if (lane_row == 0)
#pragma unroll
                        for (j = 0; j < 8; j++)
                            smem_scales[1][(col0 + j) * GMM__COL_STEP + (row0 >> 5)] =
                                gmm__word_value(GMM__SOURCE, col, j);
                }
            }
        }
        if (GMM__SCALING != GMM_SCALING_TENSOR) __syncthreads();

        /* scales from maxima; their inverses are stored */
        if (GMM__SCALING == GMM_SCALING_128X128) {
            uint32_t maximum = 0;
            for (i = 0; i < GMM__QUANT_WARPS; i++) {
                const uint32_t bits = gmm_f32_bits(smem_scales[0][i]);
                maximum = maximum > bits ? maximum : bits;
            }
            tile_scale = gmm_scale_from_amax(gmm_f32_from_bits(maximum), qmax, gmm_dtype_largest(a.source), f->eps,
                                             f->pow2);
            for (k = 0; k < 2; k++) { /* the padding is behind the last block of a line */
                const gmm_mat *m = k ? &a.columnwise : &a.rowwise;
                const int32_t line = (int32_t)(k ? c0 : p.row) / 128, block = (int32_t)(k ? p.row : c0) / 128;
                const int32_t blocks = (int32_t)(((k ? p.rows : a.cols) + 127) / 128);
                const int32_t padded_blocks = (blocks + 3) & ~3;
                uint8_t *dst = gmm__vec_scales(m, a.scale_step[k], p.unit);
                if (m->dtype != GMM_NONE && (thread == 0 || (block == blocks - 1 && block + thread < padded_blocks)))
                    ((float *)(void *)dst)[(int64_t)line * padded_blocks + block + thread] =
                        thread == 0 ? gmm_scale_inverse(tile_scale) : 0.0f;
            }
        }
        if (GMM__SCALING == GMM_SCALING_1X128) {
            const int32_t copy = thread >= GMM_TILE, l = thread & (GMM_TILE - 1), valid_line = l < (copy ? n : p.m);
            const gmm_mat *m = copy ? &a.columnwise : &a.rowwise;
            if (m->dtype != GMM_NONE) {
                const int64_t lines = copy ? (a.cols + 3) & ~(int64_t)3 : (int64_t)((padded_rows + 3) & ~3);
                const int64_t line = (copy ? c0 : p.row) + l, block = (copy ? p.row : c0) >> 7;
                uint8_t *dst = gmm__vec_scales(m, a.scale_step[copy], p.unit);
                float *smem = smem_scales[copy] + l * (copy ? GMM__COL_STEP : GMM__ROW_STEP), scale;
                uint32_t maximum = 0;
                for (i = 0; i < (copy ? 4 : 2); i++)
                    maximum = maximum > gmm_f32_bits(smem[i]) ? maximum : gmm_f32_bits(smem[i]);
                scale = gmm_scale_from_amax(gmm_f32_from_bits(maximum), qmax, gmm_dtype_largest(a.source), f->eps,
                                            f->pow2);
                smem[0] = scale;
                if (a.grouped)
                    dst += (int64_t)(copy ? p.padded_row >> 7 : p.padded_row) *
                           (copy ? lines : (a.cols + 127) >> 7) * 4;
                if (line < lines)
                    ((float *)(void *)dst)[block * lines + line] = valid_line ? gmm_scale_inverse(scale) : 0.0f;
            }
            __syncthreads();
        }
        if (rowwise && col0 < n) {
            const int64_t pitch = a.rowwise.ld;
            uint8_t *dst = gmm__vec_data(&a.rowwise, a.step[0], p.unit) + (p.source_row + p.row + row0) * pitch + c0 +
                           col0;
            const float *row_scales = smem_scales[0] + row0 * GMM__ROW_STEP;
#pragma unroll
            for (i = 0; i < 8; i++, dst += pitch) {
                float v[8];
                if (GMM__SCALING != GMM_SCALING_TENSOR && GMM__SCALING != GMM_SCALING_128X128)
                    tile_scale = row_scales[i * GMM__ROW_STEP];
#pragma unroll
                for (j = 0; j < 8; j++) v[j] = gmm__fmul(gmm__word_value(GMM__SOURCE, x[i], j), tile_scale);
                if (i < valid_rows)
                    gmm_st_global_v2_b32(dst, gmm__quant_fp8x4(e5m2, v), gmm__quant_fp8x4(e5m2, v + 4));
            }
        }
        if (columnwise) { /* transposed through shared memory */
            const int32_t bytes = GMM__VEC_COLUMN, chunks = bytes / 16;
            const int32_t step = GMM__QUANT_BLOCK / chunks, chunk = thread % chunks, first = thread / chunks;
            const int64_t pitch = a.columnwise.ld;
            const int64_t begin = (a.grouped ? p.padded_row : 0) + p.row;
            uint8_t *smem = codes + col0 * bytes + (col0 >> 3) * 16 + row0;
            uint8_t *dst = gmm__vec_data(&a.columnwise, a.step[1], p.unit) + begin + (c0 + first) * pitch + chunk * 16;
            const float *col_scales = smem_scales[1] + col0 * GMM__COL_STEP;
#pragma unroll
            for (j = 0; j < 8; j++) {
                float v[8];
                if (GMM__SCALING != GMM_SCALING_TENSOR && GMM__SCALING != GMM_SCALING_128X128)
                    tile_scale = col_scales[j * GMM__COL_STEP];
#pragma unroll
                for (i = 0; i < 8; i++) v[i] = gmm__fmul(gmm__word_value(GMM__SOURCE, x[i], j), tile_scale);
                *(uint2 *)(void *)(smem + j * bytes) = make_uint2(gmm__quant_fp8x4(e5m2, v),
                                                                  gmm__quant_fp8x4(e5m2, v + 4));
            }
            __syncthreads();
            if (chunk * 16 < (a.grouped ? (int32_t)GMM_TILE : p.m))
#pragma unroll
                for (k = first; k < GMM_TILE; k += step, dst += step * pitch)
                    if (k < n)
                        gmm_st_global_v4_b32(dst, *(const uint4 *)(const void *)(codes + k * bytes + (k >> 3) * 16 +
                                                                                 chunk * 16));
        }
        if (GMM__SCALING == GMM_SCALING_TENSOR && a.record) { /* after all stores */
            __syncthreads();
            if (thread < 2) {
                uint32_t *dst = (uint32_t *)(thread ? a.columnwise.amax : a.rowwise.amax);
                for (i = 0; i < GMM__QUANT_WARPS; i++)
                    maximum_bits = maximum_bits > gmm_f32_bits(smem_scales[0][i]) ? maximum_bits
                                                                                  : gmm_f32_bits(smem_scales[0][i]);
                if ((thread ? columnwise : rowwise) && dst && maximum_bits > *(volatile uint32_t *)(dst + p.unit))
                    atomicMax(dst + p.unit, maximum_bits);
            }
        }
        if (strip + (int32_t)gridDim.y < split.total) __syncthreads();
    }
}

#undef GMM__COL_STEP
#undef GMM__ROW_STEP
#undef GMM__BLOCK_SCALED
#undef GMM__WORDS
#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__SCALING
#undef GMM__ROW

