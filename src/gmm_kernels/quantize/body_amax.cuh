/* ======================================================================== Bodies per source: vectorized amaxes === */

#elif GMM__BODY == 12
#ifndef GMM__ROW
#error "gmm: this body needs GMM__ROW"
#endif
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__WORDS (GMM__SOURCE == GMM_F32 ? 8 : 4)
#define GMM__HADAMARD GMM__COLUMN(3, GMM__ROW)

/* The same amaxes as gmm_quantize_amax, for sources whose rows are aligned vectors: either of units, or of rows and
   columns. A CTA processes 128 x 128 tiles; GMM__HADAMARD also computes the amax of the transformed columnwise copy. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_BLOCK, GMM__HADAMARD ? 3 : GMM__WORDS == 4 ? 4 : 2)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ uint32_t shared_max[2][GMM__QUANT_WARPS]; /* of the source, and of the transformed source */
#if !GMM__HADAMARD
    __shared__ uint32_t partials[2][4][GMM_TILE]; /* partial maxima: rows by halves, columns by quarters of the tile */
#endif
    const int32_t lane = gmm__lane(), warp = gmm__warp(), lane_row = lane >> 3, lane_col = lane & 7;
    const int32_t row0 = (warp & 3) * GMM__VEC_WARP_ROWS, col0 = (warp >> 2) * GMM__VEC_WARP_COLS;
    const gmm_warp_split split = gmm__vec_split(&a);
    int32_t strip;
    if (a.skip && *a.skip) return;
    for (strip = (int32_t)blockIdx.y; strip < split.total; strip += (int32_t)gridDim.y) {
        uint32_t x[8][8], maximum = 0;
        int32_t c0, i, k;
        const gmm__vec_strip p = gmm__vec_strip_of(&a, &split, strip, 1, &c0);
        const int32_t n = (int32_t)a.cols - c0;
        gmm__vec_load(GMM__SOURCE, &a, &p, row0 + 8 * lane_row, col0 + 8 * lane_col, c0, n, x);
#if !GMM__HADAMARD
        if (a.lines) {
            uint32_t row[8];
#pragma unroll
            for (i = 0; i < 8; i++) {
                row[i] = 0;
#pragma unroll
                for (k = 0; k < GMM__WORDS; k++) row[i] = gmm__word_max(GMM__SOURCE, row[i], x[i][k]);
                row[i] = gmm__word_fold(GMM__SOURCE, row[i]);
            }
            /* butterfly: the lane obtains the maximum of row lane_col of its lane row's eight rows */
#pragma unroll
            for (k = 4; k >= 1; k >>= 1)
#pragma unroll
                for (i = 0; i < k; i++) {
                    const uint32_t own = lane_col & k ? row[i + k] : row[i];
                    const uint32_t sent = lane_col & k ? row[i] : row[i + k];
                    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, sent, k);
                    row[i] = own > other ? own : other;
                }
            partials[0][warp >> 2][row0 + lane] = row[0];
        }
        if (a.columns) {
            uint32_t col[GMM__WORDS];
#pragma unroll
            for (k = 0; k < GMM__WORDS; k++) {
                col[k] = 0;
#pragma unroll
                for (i = 0; i < 8; i++) col[k] = gmm__word_max(GMM__SOURCE, col[k], x[i][k]);
#pragma unroll
                for (i = 8; i < 32; i <<= 1)
                    col[k] = gmm__word_max(GMM__SOURCE, col[k], __shfl_xor_sync(0xFFFFFFFFu, col[k], i));
            }
#pragma unroll
            for (k = 0; k < 8; k++)
                if (k / 2 == lane_row)
                    partials[1][warp & 3][col0 + 8 * lane_col + k] = gmm_f32_bits(gmm__word_value(GMM__SOURCE, col, k));
        }
        if (a.lines || a.columns) { /* amaxes of units are not needed then */
            const int32_t copy = threadIdx.x >= GMM_TILE, l = threadIdx.x & (GMM_TILE - 1);
            uint32_t *dst = copy ? (uint32_t *)a.columns + p.unit * a.cols + c0 + l
                                 : (uint32_t *)a.lines + (a.grouped ? p.source_row : (int64_t)p.unit * p.rows) +
                                       p.row + l;
            __syncthreads();
            if ((copy ? a.columns : a.lines) && l < (copy ? n : p.m)) {
                maximum = partials[copy][0][l];
                for (i = 1; i < (copy ? 4 : 2); i++)
                    maximum = maximum > partials[copy][i][l] ? maximum : partials[copy][i][l];
                if (maximum > *(volatile uint32_t *)dst) atomicMax(dst, maximum);
            }
            if (strip + (int32_t)gridDim.y < split.total) __syncthreads();
            continue;
        }
#endif
#pragma unroll
        for (i = 0; i < 8; i++)
#pragma unroll
            for (k = 0; k < GMM__WORDS; k++) maximum = gmm__word_max(GMM__SOURCE, maximum, x[i][k]);
        maximum = __reduce_max_sync(0xFFFFFFFFu, gmm__word_fold(GMM__SOURCE, maximum));
        if (lane == 0) shared_max[0][warp] = maximum;
#if GMM__HADAMARD
        if (a.format.hadamard && a.columnwise.dtype != GMM_NONE) {
            gmm__vec_flip_signs(x, (uint32_t)a.format.hadamard >> 8 * (lane_row & 1));
            maximum = __reduce_max_sync(0xFFFFFFFFu, gmm__vec_hadamard_amax(x, lane_row & 1));
        }
        if (lane == 0) shared_max[1][warp] = maximum;
#endif
        __syncthreads();
        if (threadIdx.x <= GMM__HADAMARD) {
            uint32_t *dst = (uint32_t *)a.amax[threadIdx.x] + p.unit;
            maximum = shared_max[threadIdx.x][0];
            for (i = 1; i < GMM__QUANT_WARPS; i++)
                maximum = maximum > shared_max[threadIdx.x][i] ? maximum : shared_max[threadIdx.x][i];
            if (maximum > *(volatile uint32_t *)dst) atomicMax(dst, maximum);
        }
        if (strip + (int32_t)gridDim.y < split.total) __syncthreads();
    }
}

#undef GMM__WORDS
#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__HADAMARD
#undef GMM__ROW

