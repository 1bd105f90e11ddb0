#if GMM__HOLDS(0) && !defined(GMM_NO_QUANT)
/* Dequantizes a copy in either direction into a matrix in the layout of the source. A CTA processes one 128 x 128
   tile at a time. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_dequantize_tiles(const __grid_constant__ gmm__dequant_args a) {
    extern __shared__ float gmm__dequant_shared[];
    gmm_pdl_wait_only();
    const int64_t tile_count = gmm__quant_strips(a.grouped, a.tiles, a.units, a.rows) * a.col_tiles;
    const int32_t lane = gmm__lane(), columnwise = a.direction == GMM_COLUMNWISE;
    const int64_t size = a.dst.dtype == GMM_F32 ? 4 : 2;
    int64_t tile_index;
    for (tile_index = blockIdx.x; tile_index < tile_count; tile_index += gridDim.x) {
        const gmm__quant_strip p = gmm__quant_strip_of(a.grouped, a.tiles, a.offsets, a.units, a.rows,
                                                       tile_index / a.col_tiles);
        const gmm__qview v = gmm__quant_copy(&a.src, a.direction, a.grouped, &p, a.cols);
        const int64_t c0 = tile_index % a.col_tiles * GMM_TILE;
        const int32_t n = gmm__quant_extent(a.cols, c0);
        const int32_t width = gmm_block_along(v.scaling), lines = columnwise ? n : (int32_t)p.m;
        const int32_t along = columnwise ? (int32_t)p.m : n;
        const int64_t line0 = columnwise ? c0 : p.row, along0 = columnwise ? p.row : c0;
        char *base = a.dst.table ? (char *)a.dst.table[p.unit]
                                 : (char *)a.dst.data + (a.grouped ? 0 : p.unit * a.dst.group_stride) * size;
        int32_t l, i;
        for (l = gmm__warp(); l < lines; l += GMM__QUANT_WARPS)
            for (i = lane; i < along; i += 32) {
                const float decode_scale = gmm__qview_factor(&v, line0 + l, width ? (along0 + i) / width : 0, 1);
                const uint8_t code = gmm__qview_code(&v, line0 + l, along0 + i);
                const float value = gmm__qview_value(gmm_decode_small(v.dtype, code), decode_scale);
                gmm__dequant_shared[columnwise ? gmm__quant_smem_index(i, l) : gmm__quant_smem_index(l, i)] = value;
            }
        __syncthreads();
        for (l = gmm__warp(); l < p.m; l += GMM__QUANT_WARPS) {
            char *dst = base + ((p.source_row + p.row + l) * a.dst.ld + c0) * size;
            float x[4];
            gmm__quant_load_row(gmm__dequant_shared, l, x);
            if (4 * lane < n)
                gmm_write4(a.dst.dtype, dst + 4 * lane * size, n - 4 * lane, gmm_vec4_aligned(a.dst.dtype, dst, 0), x);
        }
        __syncthreads();
    }
}

/* Transposes rows 4 q to 4 q + 3 of a tile, of which each lane has 4 bytes per row, into words that hold 4 rows of
   one column. Words of one column are contiguous, and the lanes of a warp access different banks. */
GMM__DEVICE void gmm__transpose_rows4(const uint32_t v[4], int32_t q, uint32_t *tile) {
    const uint32_t a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
    const uint32_t c = __byte_perm(v[0], v[1], 0x7362), d = __byte_perm(v[2], v[3], 0x7362);
    const uint32_t x[4] = { __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                            __byte_perm(c, d, 0x7632) };
    const int32_t lane = gmm__lane();
    int32_t i;
#pragma unroll
    for (i = 0; i < 4; i++) {
        const int32_t j = (i + lane / 8) & 3;
        tile[(4 * lane + j) * (GMM__QUANT_CODES_PITCH / 4) + q] = j & 2 ? (j & 1 ? x[3] : x[2]) : j & 1 ? x[1] : x[0];
    }
}

/* Four codes of E2M1 as bytes, and bytes as codes of E2M1. */
GMM__DEVICE uint32_t gmm__transpose_unpack4(uint32_t codes) {
    const uint32_t halves = (codes | codes << 8) & 0x00FF00FFu;
    return (halves | halves << 4) & 0x0F0F0F0Fu;
}
GMM__DEVICE uint32_t gmm__transpose_pack4(uint32_t bytes) {
    const uint32_t halves = (bytes | bytes >> 4) & 0x00FF00FFu;
    return (halves | halves >> 8) & 0xFFFFu;
}
/* Loads and stores four codes of a row. */
GMM__DEVICE uint32_t gmm__transpose_load4(const uint8_t *src, int32_t e2m1) {
    return e2m1 ? gmm__transpose_unpack4(*(const uint16_t *)src) : *(const uint32_t *)src;
}
GMM__DEVICE void gmm__transpose_store4(uint8_t *dst, int32_t e2m1, uint32_t codes) {
    if (e2m1) *(uint16_t *)dst = (uint16_t)gmm__transpose_pack4(codes);
    else *(uint32_t *)dst = codes;
}

/* Transposes codes, which are bytes in shared memory, and scales in tiles of 128 x 128; four codes per access where
   both matrices are aligned. e2m1 is a constant of the kernel: loads in branches would wait for one another. */
GMM__DEVICE void gmm__transpose_all(const gmm__transpose_args *a, int32_t e2m1) {
    __shared__ uint32_t tile[GMM_TILE * GMM__QUANT_CODES_PITCH / 4];
    uint8_t *codes = (uint8_t *)tile;
    const int64_t row_tiles = gmm__ceil_div(a->rows, GMM_TILE), col_tiles = gmm__ceil_div(a->cols, GMM_TILE);
    const int32_t lane = gmm__lane(), bytes4 = e2m1 ? 2 : 4;
    const int64_t src_pitch = a->src.ld * bytes4 / 4, dst_pitch = a->dst.ld * bytes4 / 4, tile_bytes = 32 * bytes4;
    int64_t index;
    gmm_pdl_wait_only();
    for (index = blockIdx.x; index < a->units * row_tiles * col_tiles; index += gridDim.x) {
        const int64_t unit = index / (row_tiles * col_tiles), row_tile = index / col_tiles % row_tiles,
                      col_tile = index % col_tiles;
        const gmm__qview src_view = gmm__qview_of(&a->src, GMM_ROWWISE, 0, unit, 0, 0, a->rows, a->cols);
        const gmm__qview dst_view = gmm__qview_of(&a->dst, GMM_COLUMNWISE, 0, unit, 0, 0, a->rows, a->cols);
        const uint8_t *src = src_view.data + (row_tile * src_view.ld + col_tile) * tile_bytes;
        uint8_t *dst = dst_view.data + (col_tile * dst_view.ld + row_tile) * tile_bytes;
        const int32_t m = gmm__quant_extent(a->rows, row_tile * GMM_TILE);
        const int32_t n = gmm__quant_extent(a->cols, col_tile * GMM_TILE);
        const int words =
            (((uintptr_t)src | (uintptr_t)src_pitch | (uintptr_t)dst | (uintptr_t)dst_pitch) & (bytes4 - 1)) == 0 &&
            (m | n) % 4 == 0;
        int32_t l, k;
        if (words) {
            uint32_t v[GMM_TILE / 4 / GMM__QUANT_WARPS][4];
#pragma unroll
            for (l = 0; l < GMM_TILE / 4 / GMM__QUANT_WARPS; l++)
#pragma unroll
                for (k = 0; k < 4; k++) {
                    const int32_t row = 4 * (l * GMM__QUANT_WARPS + gmm__warp()) + k;
                    v[l][k] = row < m && 4 * lane < n
                                  ? gmm__transpose_load4(src + row * src_pitch + bytes4 * lane, e2m1) : 0u;
                }
#pragma unroll
            for (l = 0; l < GMM_TILE / 4 / GMM__QUANT_WARPS; l++)
                gmm__transpose_rows4(v[l], l * GMM__QUANT_WARPS + gmm__warp(), tile);
        } else
            for (l = gmm__warp(); l < m; l += GMM__QUANT_WARPS)
                for (k = lane; k < n; k += 32)
                    codes[k * GMM__QUANT_CODES_PITCH + l] = e2m1 ? gmm_nibble(src + l * src_pitch, k)
                                                           : src[l * src_pitch + k];
        __syncthreads();
        for (l = gmm__warp(); l < n; l += GMM__QUANT_WARPS)
            if (words) {
                if (4 * lane < m)
                    gmm__transpose_store4(dst + l * dst_pitch + bytes4 * lane, e2m1,
                                          tile[l * (GMM__QUANT_CODES_PITCH / 4) + lane]);
            } else if (e2m1)
                for (k = 2 * lane; k < m; k += 64)
                    dst[l * dst_pitch + k / 2] = (uint8_t)(codes[l * GMM__QUANT_CODES_PITCH + k] |
                                                           codes[l * GMM__QUANT_CODES_PITCH + k + 1] << 4);
            else
                for (k = lane; k < m; k += 32) dst[l * dst_pitch + k] = codes[l * GMM__QUANT_CODES_PITCH + k];
        if (e2m1)
            gmm__qview_transpose_nv16_scales(&src_view, &dst_view, row_tile, col_tile, (int32_t)threadIdx.x,
                                             GMM__QUANT_THREADS);
        else if (threadIdx.x == 0) gmm__qview_transpose_scale(&src_view, &dst_view, row_tile, col_tile);
        __syncthreads();
    }
}
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__TRANSPOSE_PER_SM)
gmm_transpose_tiles(const __grid_constant__ gmm__transpose_args a) {
    gmm__transpose_all(&a, 0);
}
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__TRANSPOSE_PER_SM)
gmm_transpose_e2m1_tiles(const __grid_constant__ gmm__transpose_args a) {
    gmm__transpose_all(&a, 1);
}

typedef struct gmm__update_args {
    float *history, *scale;
    int64_t stride;
    int32_t slots, length, margin, most_recent;
    float qmax;
} gmm__update_args;

/* Delayed scaling: each slot's scale from its amax history. One thread per slot. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_update_scale_slots(const __grid_constant__ gmm__update_args a) {
    const int64_t i = (int64_t)blockIdx.x * GMM__QUANT_THREADS + threadIdx.x;
    gmm_pdl_wait_only();
    if (i < a.slots)
        a.scale[i] = gmm_delayed_scale(a.history + i, a.stride, a.length, a.qmax, a.margin, a.most_recent, 0.0f,
                                       a.scale[i]);
}

/* The master weights of one shard: gmm_shard_amax computes amaxes of blocks by atomic maxima on their bits,
   gmm_shard_codes writes scales and codes. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_shard_amax(const __grid_constant__ gmm__shard_args a) {
    const int64_t first = (int64_t)blockIdx.x * GMM__QUANT_THREADS + threadIdx.x;
    const int64_t step = (int64_t)gridDim.x * GMM__QUANT_THREADS;
    int64_t i;
    int32_t k;
    gmm_pdl_wait_only();
    for (i = first; i < a.length; i += step) {
        const int64_t e = a.start + i, member = e / (a.rows * a.cols), row = e / a.cols % a.rows, col = e % a.cols;
        const uint32_t bits = gmm_amax_bits(0u, gmm__shard_value(&a, i));
        for (k = 0; k < 2 + (a.format.scaling == GMM_SCALING_NV16); k++)
            if (k == 2 || a.copy[k].dtype != GMM_NONE) {
                uint32_t *dst = (uint32_t *)&a.amax[k == 2 ? member : gmm__shard_amax_at(&a, k, member, row, col)];
                if (bits > *(volatile uint32_t *)dst) atomicMax(dst, bits);
            }
    }
}
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_shard_codes(const __grid_constant__ gmm__shard_args a) {
    const int64_t first = (int64_t)blockIdx.x * GMM__QUANT_THREADS + threadIdx.x;
    const int64_t step = (int64_t)gridDim.x * GMM__QUANT_THREADS;
    int64_t i, begin, end, lines, blocks;
    int32_t k;
    gmm_pdl_wait_only();
    for (k = 0; k < 2; k++) {
        if (a.copy[k].dtype == GMM_NONE) continue;
        gmm__shard_scales(&a, k, &lines, &blocks);
        for (i = first; i < a.count * lines * blocks; i += step) gmm__shard_store_scale(&a, k, i);
        gmm__shard_parts(&a, k, &begin, &end);
        for (i = begin + first; i < end; i += step) gmm__shard_store_part(&a, k, i);
    }
}
#endif

#ifndef GMM_NO_QUANT
/* These tables are in one slice, since casts call functions of the amax instance of their source. */
#if GMM__HOLDS(5)
#define GMM__BODY GMM__BODY_QUANTIZE_AMAX
/* kernel, dtype of the source */
#define GMM__ROW (gmm_quantize_amax_bf16, bf16)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_quantize_amax_f16, f16)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_quantize_amax_f32, f32)
#include GMM_KERNELS_FILE
#undef GMM__BODY

/* Casts to any format, by dtype of the source. */
#define GMM__BODY GMM__BODY_QUANTIZE
/* kernel, dtype of the source */
#define GMM__ROW (gmm_quantize_bf16, bf16)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_quantize_f16, f16)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_quantize_f32, f32)
#include GMM_KERNELS_FILE
#undef GMM__BODY

#define GMM__BODY GMM__BODY_AMAX
/* kernel, dtype of the source, transformed columnwise copy */
#define GMM__ROW (gmm_amax_bf16, bf16, 0)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_amax_f16, f16, 0)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_amax_f32, f32, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_amax_hadamard_bf16, bf16, 1)
#include GMM_KERNELS_FILE
#undef GMM__BODY

#define GMM__BODY GMM__BODY_SCALED
/* kernel, dtype of the source, scaling, what the source is */
#define GMM__ROW (gmm_cast_tensor_bf16, bf16, GMM_SCALING_TENSOR, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_tensor_f32, f32, GMM_SCALING_TENSOR, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_row_bf16, bf16, GMM_SCALING_ROW, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_row_f32, f32, GMM_SCALING_ROW, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_1x128_bf16, bf16, GMM_SCALING_1X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_1x128_f32, f32, GMM_SCALING_1X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_128x128_bf16, bf16, GMM_SCALING_128X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_128x128_f32, f32, GMM_SCALING_128X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_act_tensor_bf16, bf16, GMM_SCALING_TENSOR, GMM__CAST_OF_ACT)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_act_1x128_bf16, bf16, GMM_SCALING_1X128, GMM__CAST_OF_ACT)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_gradient_tensor_bf16, bf16, GMM_SCALING_TENSOR, GMM__CAST_OF_GRADIENT)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_gradient_1x128_bf16, bf16, GMM_SCALING_1X128, GMM__CAST_OF_GRADIENT)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_cast_tensor_f16, f16, GMM_SCALING_TENSOR, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_row_f16, f16, GMM_SCALING_ROW, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_1x128_f16, f16, GMM_SCALING_1X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_128x128_f16, f16, GMM_SCALING_128X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#endif
#undef GMM__BODY

#define GMM__BODY GMM__BODY_MX
/* kernel, dtype of the source */
#define GMM__ROW (gmm_cast_mx32_bf16, bf16)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_cast_mx32_f16, f16)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_cast_mx32_f32, f32)
#include GMM_KERNELS_FILE
#undef GMM__BODY

/* NV16. GMM__HADAMARD 1: BF16 with a Hadamard-transformed columnwise copy or with stochastic rounding. */
#define GMM__BODY GMM__BODY_NV
/* kernel, dtype of the source, transformed columnwise copy or stochastic rounding */
#define GMM__ROW (gmm_cast_nv16_bf16, bf16, 0)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_cast_nv16_f16, f16, 0)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_cast_nv16_f32, f32, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_nv16_hadamard_bf16, bf16, 1)
#include GMM_KERNELS_FILE
#undef GMM__BODY
#endif
#endif /* GMM_NO_QUANT */

