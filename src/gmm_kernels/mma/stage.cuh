/* Stages of the portable products (loads by cp.async for 16 bits, through registers for fp32), and their instances. */

/* Shape of one 16-bit operand's stages, constant per kernel. A stage has rows of contiguous elements, as the operand is
   stored: its rows are rows of A or B where the operand is stored as [mn][k], and values of k where it is stored as
   [k][mn]. */
typedef struct gmm_stage_shape {
    int row_bytes;
    int mn;             /* rows of A or B in a stage */
    int k_rows, k_cols; /* extent of a stage along k, in rows where the operand is stored as [k][mn], else in columns;
                           the other one is 0 */
    int row_step;       /* rows that the CTA copies at once, 16 bytes per thread */
    int chunks;         /* 16-byte chunks of a stage per thread */
} gmm_stage_shape;

GMM__DEVICE gmm_stage_shape gmm_stage_shape_of(int mn_major, int mn, int k, int threads) {
    gmm_stage_shape shape;
    shape.row_bytes = 2 * (mn_major ? mn : k);
    shape.mn = mn;
    shape.k_rows = mn_major ? k : 0;
    shape.k_cols = mn_major ? 0 : k;
    shape.row_step = threads * 16 / shape.row_bytes;
    shape.chunks = mn * k / 8 / threads;
    return shape;
}

/* A thread's part of one operand that is copied into stages: the chunk at `src` and further ones, `chunk_stride` bytes
   apart. */
typedef struct gmm_stage_loader {
    const char *src;
    int64_t chunk_stride, stage_stride; /* bytes between chunks of a stage, and between stages */
    int32_t rows, cols;                 /* of the operand, from the thread's first chunk in stage 0 on */
    int32_t aligned;                    /* chunks are aligned to 16 bytes */
    int32_t full_stages;                /* number of stages that are complete and aligned */
    uint32_t offset;                    /* of the thread's first chunk in the stage, in bytes */
} gmm_stage_loader;

/* Offset of a 16-byte chunk of a row in a stage. The chunks of a row are permuted so that equal chunks of 8 adjacent
   rows are in different banks. */
GMM__DEVICE uint32_t gmm_swizzle(uint32_t row, uint32_t chunk, uint32_t row_bytes) {
    return row * row_bytes + ((chunk ^ (row_bytes == 64 ? (row >> 1) & 3u : row & 7u)) << 4);
}

/* Loader of the `rows` x `cols` elements from (row0, col0) of the stored matrix of group g on. */
GMM__DEVICE gmm_stage_loader gmm_stage_loader_init(const gmm_kmat *m, int32_t g, int64_t row0, int64_t col0,
                                                   int32_t rows, int32_t cols, gmm_stage_shape shape) {
    gmm_stage_loader loader;
    const int64_t pitch = m->ld * 2;
    const int row_chunks = shape.row_bytes / 16;
    const int row = (int)threadIdx.x / row_chunks, chunk = (int)threadIdx.x % row_chunks;
    const char *base = gmm_kmat_data(m, g);
    loader.src = base + (row0 + row) * pitch + (col0 + chunk * 8) * 2;
    loader.chunk_stride = pitch * shape.row_step;
    loader.stage_stride = pitch * shape.k_rows + 2 * shape.k_cols;
    loader.rows = rows - row;
    loader.cols = cols - chunk * 8;
    loader.aligned = (((uint64_t)(uintptr_t)base | (uint64_t)pitch) & 15) == 0;
    loader.full_stages = shape.k_rows ? (cols >= shape.mn ? rows / shape.k_rows : 0)
                                      : (rows >= shape.mn ? cols / shape.k_cols : 0);
    if (!loader.aligned) loader.full_stages = 0;
    loader.offset = gmm_swizzle((uint32_t)row, (uint32_t)chunk, (uint32_t)shape.row_bytes);
    return loader;
}

/* Copies stage number `stage_index`, with zeros beyond the operand, and advances to the next stage. */
GMM__DEVICE void gmm_stage_load(gmm_stage_loader *loader, char *stage, int stage_index, gmm_stage_shape shape) {
    const int step_bytes = shape.row_step * shape.row_bytes;
    const uint32_t smem = (uint32_t)__cvta_generic_to_shared(stage) + loader->offset;
    const char *src = loader->src;
    int i, e;
    if (stage_index < loader->full_stages) {
#pragma unroll
        for (i = 0; i < shape.chunks; i++, src += loader->chunk_stride)
            gmm_cp_async_16(smem + (uint32_t)(i * step_bytes), src);
    } else {
        const int rows = loader->rows - stage_index * shape.k_rows, cols = loader->cols - stage_index * shape.k_cols;
        const int valid = cols < 0 ? 0 : cols > 8 ? 8 : cols;
        if (loader->aligned) {
#pragma unroll
            for (i = 0; i < shape.chunks; i++, src += loader->chunk_stride)
                gmm_cp_async_16_zfill(smem + (uint32_t)(i * step_bytes), src,
                                      i * shape.row_step < rows ? 2 * valid : 0);
        } else {
            uint16_t *h = (uint16_t *)(stage + loader->offset);
#pragma unroll 1
            for (i = 0; i < shape.chunks; i++, src += loader->chunk_stride, h += step_bytes / 2)
#pragma unroll 1
                for (e = 0; e < 8; e++)
                    h[e] = i * shape.row_step < rows && e < valid ? ((const uint16_t *)src)[e] : (uint16_t)0;
        }
    }
    loader->src += loader->stage_stride;
}

typedef struct gmm_stage_loaders { gmm_stage_loader a, b; } gmm_stage_loaders;

/* A warp's part of a tile: its first row and column, and in a stage the byte offsets of the row of the first four 8 x 8
   blocks of A and of B that this lane names to ldmatrix. A stage has A before B. */
typedef struct gmm_mma_warp {
    int m, n;
    uint32_t a, b;
} gmm_mma_warp;

/* Order of the four blocks of an ldmatrix. A: (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8). B: (n, k), (n, k + 8),
   (n + 8, k), (n + 8, k + 8). `ta`, `tb`: whether A, B are stored as [k][mn]; row bytes: of a stage. */
GMM__DEVICE gmm_mma_warp gmm_mma_warp_init(int m, int n, int ta, int tb, uint32_t a_row_bytes, uint32_t b_row_bytes,
                                           uint32_t a_bytes) {
    const int lane = (int)threadIdx.x & 31;
    gmm_mma_warp w;
    w.m = m;
    w.n = n;
    if (ta)
        w.a = gmm_swizzle((uint32_t)((lane & 7) + (lane >> 4) * 8), (uint32_t)(m / 8 + (lane >> 3 & 1)), a_row_bytes);
    else w.a = gmm_swizzle((uint32_t)(m + (lane & 15)), (uint32_t)(lane >> 4), a_row_bytes);
    if (tb) w.b = gmm_swizzle((uint32_t)(lane & 15), (uint32_t)(n / 8 + (lane >> 4)), b_row_bytes);
    else w.b = gmm_swizzle((uint32_t)(n + (lane & 7) + (lane >> 4) * 8), (uint32_t)(lane >> 3 & 1), b_row_bytes);
    w.b += a_bytes;
    return w;
}

/* ldmatrix of 16 rows of A or B, block i of the warp, and 16 values of k, step s of the stage at `stage`. */
GMM__DEVICE void gmm_mma_load_fragment(uint32_t fragment[4], int mn_major, uint32_t stage, uint32_t offset, int i,
                                       int s, int row_bytes) {
    if (mn_major) gmm_ldmatrix_x4_trans(fragment, stage + (offset ^ (uint32_t)(i * 32)) + s * 16 * row_bytes);
    else gmm_ldmatrix_x4(fragment, stage + (offset ^ (uint32_t)(s * 32)) + i * 16 * row_bytes);
}

/* Tile and instances of the fp32 product, which uses the CUDA cores: X(op, kernel). */
enum { gmm_bm_f32 = 128, gmm_bn_f32 = 128, gmm_bk_f32 = 16, gmm_ld_f32 = 132, gmm_threads_f32 = 256 };
#define GMM_F32_KERNEL_LIST(X) \
    X(fwd, gmm_gemm_fwd_f32_128x128x16_mma) \
    X(dgrad, gmm_gemm_dgrad_f32_128x128x16_mma) \
    X(wgrad, gmm_gemm_wgrad_f32_128x128x16_mma)

#define GMM__BODY GMM__BODY_TENSOR
/* kernel, operation, precision, tile */
#if GMM__HOLDS(4)
#define GMM__ROW (gmm_gemm_fwd_bf16_128x256x64_mma, fwd, bf16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_64x128x32_mma, fwd, bf16, 64x128)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_128x256x64_mma, dgrad, bf16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_64x128x32_mma, dgrad, bf16, 64x128)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_bf16_128x256x64_mma, wgrad, bf16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_bf16_64x128x32_mma, wgrad, bf16, 64x128)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_gemm_fwd_f16_128x256x64_mma, fwd, f16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_64x128x32_mma, fwd, f16, 64x128)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_128x256x64_mma, dgrad, f16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_64x128x32_mma, dgrad, f16, 64x128)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_f16_128x256x64_mma, wgrad, f16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_f16_64x128x32_mma, wgrad, f16, 64x128)
#include GMM_KERNELS_FILE
#endif
#endif
#undef GMM__BODY

/* One stage of an operand of the fp32 product: each thread loads, twice, 4 values of k of a row or, from an operand
   stored as [k][rows], 4 rows of a value of k; then it stores them to shared memory as [k][rows]. */
GMM__DEVICE void gmm_f32_load_stage(int transposed, const char *base, int vec4, int64_t ld, int rows, int k0, int k,
                                    float v[2][4]) {
    int i;
#pragma unroll
    for (i = 0; i < 2; i++) {
        const int c = (int)threadIdx.x + i * gmm_threads_f32;
        const int row = transposed ? k0 + c / 32 : c / 4, col = transposed ? c % 32 * 4 : k0 + c % 4 * 4;
        const int count = row < (transposed ? k : rows) ? (transposed ? rows : k) - col : 0;
        gmm_read4(GMM_F32, base + 4 * (row * ld + col), count, vec4, v[i]);
    }
}
GMM__DEVICE void gmm_f32_store_stage(int transposed, float *smem, const float v[2][4]) {
    int i, j;
#pragma unroll
    for (i = 0; i < 2; i++) {
        const int c = (int)threadIdx.x + i * gmm_threads_f32;
        if (transposed) {
            *(float4 *)&smem[c / 32 * gmm_ld_f32 + c % 32 * 4] = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
            continue;
        }
#pragma unroll
        for (j = 0; j < 4; j++) smem[(c % 4 * 4 + j) * gmm_ld_f32 + c / 4] = v[i][j];
    }
}

#define GMM__BODY GMM__BODY_FP32
/* kernel, operation */
#if GMM__HOLDS(5)
#define GMM__ROW (gmm_gemm_fwd_f32_128x128x16_mma, fwd)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f32_128x128x16_mma, dgrad)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_f32_128x128x16_mma, wgrad)
#include GMM_KERNELS_FILE
#endif
#undef GMM__BODY

/* One row per kernel. */
typedef struct gmm_gemm_kernel {
    gmm_gemm_op op;
    gmm_dtype dtype;
    int32_t tile_rows, tile_cols, threads, blocks, shared;
    const void *function;
    const char *name;
} gmm_gemm_kernel;

#if GMM__HOLDS(0)
#define GMM__X(op, dtype, tag, tile, kernel) GMM__DECLARE_KERNEL(kernel, gmm_gemm_args)
GMM_MMA_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, kernel) GMM__DECLARE_KERNEL(kernel, gmm_gemm_args)
GMM_F32_KERNEL_LIST(GMM__X)
#undef GMM__X
static const gmm_gemm_kernel gmm_gemm_kernels[] = {
#define GMM__X(op, dtype, tag, tile, kernel) \
    { GMM__CAT(gmm_gemm_, op), dtype, GMM__CAT(gmm_bm_, tile), GMM__CAT(gmm_bn_, tile), GMM__CAT(gmm_threads_, tile), \
      GMM__CAT(gmm_ctas_, tile), GMM__CAT(gmm_shared_, tile), (const void *)kernel, #kernel },
    GMM_MMA_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, kernel) \
    { GMM__CAT(gmm_gemm_, op), GMM_F32, gmm_bm_f32, gmm_bn_f32, gmm_threads_f32, 1, 0, (const void *)kernel, #kernel },
    GMM_F32_KERNEL_LIST(GMM__X)
#undef GMM__X
};
enum { GMM_GEMM_KERNELS = (int)(sizeof gmm_gemm_kernels / sizeof gmm_gemm_kernels[0]) };
#endif /* GMM__HOLDS(0) */

