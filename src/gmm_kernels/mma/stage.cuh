/* A thread's view of one 16-bit operand that is copied into stages. A stage consists of lines of contiguous
   elements: rows of an operand stored as [row][k], or values of k of an operand stored as [k][row]. The thread
   copies the 16-byte chunk at `src` and further chunks, `chunk_stride` bytes apart. `lines` and `cols` are the
   numbers of lines and elements left from there. */
typedef struct gmm_stage_loader {
    const char *src;
    int64_t chunk_stride, stage_stride; /* bytes between chunks of a stage, and between stages */
    int32_t lines, cols;                /* left in stage 0 */
    int32_t aligned;                    /* chunks are aligned to 16 bytes */
    int32_t full_stages;                /* number of stages that are complete and aligned */
    uint32_t offset;                    /* offset in the stage */
} gmm_stage_loader;

/* Swizzle: chunks are permuted within a line so that 8 adjacent lines fall into different banks. */
GMM__DEVICE uint32_t gmm_swizzle(uint32_t line, uint32_t chunk, uint32_t line_bytes) {
    return line * line_bytes + ((chunk ^ (line_bytes == 64 ? (line >> 1) & 3u : line & 7u)) << 4);
}

GMM__DEVICE gmm_stage_loader gmm_stage_loader_init(const gmm_kmat *m, int32_t g, int64_t row, int64_t col,
                                                   int32_t lines, int32_t cols, int line_chunks, int threads, int span,
                                                   int k_lines, int k_cols) {
    gmm_stage_loader loader;
    const int64_t pitch = m->ld * 2;
    const int line = (int)threadIdx.x / line_chunks, chunk = (int)threadIdx.x % line_chunks;
    const char *base = gmm_kmat_data(m, g);
    loader.src = base + (row + line) * pitch + (col + chunk * 8) * 2;
    loader.chunk_stride = pitch * (threads / line_chunks);
    loader.stage_stride = pitch * k_lines + 2 * k_cols;
    loader.lines = lines - line;
    loader.cols = cols - chunk * 8;
    loader.aligned = (((uint64_t)(uintptr_t)base | (uint64_t)pitch) & 15) == 0;
    loader.full_stages = k_lines ? (cols >= span ? lines / k_lines : 0) : (lines >= span ? cols / k_cols : 0);
    if (!loader.aligned) loader.full_stages = 0;
    loader.offset = gmm_swizzle((uint32_t)line, (uint32_t)chunk, (uint32_t)line_chunks * 16);
    return loader;
}

/* Copies stage number `stage_index`, with zeros beyond the operand, and advances to the next stage. */
GMM__DEVICE void gmm_stage_load(gmm_stage_loader *loader, char *stage, int stage_index, int chunks, int step,
                                int line_bytes, int k_lines, int k_cols) {
    const uint32_t smem = (uint32_t)__cvta_generic_to_shared(stage) + loader->offset;
    const char *src = loader->src;
    int i, e;
    if (stage_index < loader->full_stages) {
#pragma unroll
        for (i = 0; i < chunks; i++, src += loader->chunk_stride)
            gmm_cp_async_16(smem + (uint32_t)(i * step * line_bytes), src);
    } else {
        const int lines = loader->lines - stage_index * k_lines, cols = loader->cols - stage_index * k_cols;
        const int valid = cols < 0 ? 0 : cols > 8 ? 8 : cols;
        if (loader->aligned) {
#pragma unroll
            for (i = 0; i < chunks; i++, src += loader->chunk_stride)
                gmm_cp_async_16_zfill(smem + (uint32_t)(i * step * line_bytes), src, i * step < lines ? 2 * valid : 0);
        } else {
            uint16_t *h = (uint16_t *)(stage + loader->offset);
#pragma unroll 1
            for (i = 0; i < chunks; i++, src += loader->chunk_stride, h += step * line_bytes / 2)
#pragma unroll 1
                for (e = 0; e < 8; e++) h[e] = i * step < lines && e < valid ? ((const uint16_t *)src)[e] : (uint16_t)0;
        }
    }
    loader->src += loader->stage_stride;
}

/* Tile of the fp32 product, which uses the CUDA cores. */
enum { gmm_bm_f32 = 128, gmm_bn_f32 = 128, gmm_bk_f32 = 16, gmm_ld_f32 = 132, gmm_threads_f32 = 256 };

/* GMM__BODY selects the body: 1 product on tensor cores, 2 fp32 product, 3 bias gradient. */
#define GMM__BODY 1
/* kernel, operation, precision, tile */
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
#undef GMM__BODY

/* One stage of an operand of the fp32 product: each thread loads, twice, 4 values of k of a row or, from an operand
   stored as [k][rows], 4 rows of a value of k; then it stores them to shared memory as [k][rows]. */
GMM__DEVICE void gmm_f32_load_stage(int transposed, const char *base, int vec4, int64_t ld, int rows, int k0, int k,
                                    float v[2][4]) {
    int i;
#pragma unroll
    for (i = 0; i < 2; i++) {
        const int c = (int)threadIdx.x + i * gmm_threads_f32;
        const int line = transposed ? k0 + c / 32 : c / 4, col = transposed ? c % 32 * 4 : k0 + c % 4 * 4;
        const int count = line < (transposed ? k : rows) ? (transposed ? rows : k) - col : 0;
        gmm_read4(GMM_F32, base + 4 * (line * ld + col), count, vec4, v[i]);
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

#define GMM__BODY 2
/* kernel, operation */
#define GMM__ROW (gmm_gemm_fwd_f32_128x128x16_mma, fwd)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f32_128x128x16_mma, dgrad)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_f32_128x128x16_mma, wgrad)
#include GMM_KERNELS_FILE
#undef GMM__BODY

/* One row per kernel. */
typedef struct gmm_gemm_kernel {
    gmm_gemm_op op;
    gmm_dtype dtype;
    int32_t tile_rows, tile_cols, threads, blocks, shared;
    const void *function;
} gmm_gemm_kernel;

static const gmm_gemm_kernel gmm_gemm_kernels[] = {
#define GMM__X(op, dtype, tag, tile, kernel) \
    { GMM__CAT(gmm_gemm_, op), dtype, GMM__CAT(gmm_bm_, tile), GMM__CAT(gmm_bn_, tile), GMM__CAT(gmm_threads_, tile), \
      GMM__CAT(gmm_ctas_, tile), GMM__CAT(gmm_shared_, tile), (const void *)kernel },
    GMM_MMA_KERNEL_LIST(GMM__X)
#undef GMM__X
    { gmm_gemm_fwd, GMM_F32, gmm_bm_f32, gmm_bn_f32, gmm_threads_f32, 1, 0,
      (const void *)gmm_gemm_fwd_f32_128x128x16_mma },
    { gmm_gemm_dgrad, GMM_F32, gmm_bm_f32, gmm_bn_f32, gmm_threads_f32, 1, 0,
      (const void *)gmm_gemm_dgrad_f32_128x128x16_mma },
    { gmm_gemm_wgrad, GMM_F32, gmm_bm_f32, gmm_bn_f32, gmm_threads_f32, 1, 0,
      (const void *)gmm_gemm_wgrad_f32_128x128x16_mma }
};
enum { GMM_GEMM_KERNELS = (int)(sizeof gmm_gemm_kernels / sizeof gmm_gemm_kernels[0]) };

