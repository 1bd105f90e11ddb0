/* What a CTA loads of an operand in every stage: the boxes in `mask`, of 64 rows each. */
typedef struct gmm_fp8_operand {
    const CUtensorMap *map;
    uint32_t mask;
    int32_t multicast;    /* both CTAs of the cluster get what one of them loads */
    int32_t y, end, wrap; /* the last three TMA coordinates of the first box */
} gmm_fp8_operand;
/* Loads them; at most `count`, a constant. to: where the operand begins in the stage. x: their first TMA coordinate. */
GMM__DEVICE void gmm_fp8_load_operand(const gmm_fp8_operand *o, const int count, uint32_t to, uint32_t full,
                                      int32_t x) {
    int i;
#pragma unroll
    for (i = 0; i < count; i++)
        if (o->mask >> i & 1)
            gmm_tma_load(to + GMM_SM90_BOX_BYTES * i, o->map, full, o->multicast, x, o->y + 64 * i, o->end, o->wrap);
}

/* The store warp: one lane per box of each consumer's store slot. A tile is stored in parts of as many columns as a
   slot holds. For each part the lane loads old D where the tile says so, passes the slot to its consumer (slot.empty),
   waits until the consumer has written it (slot.full) and stores it. Tiles that have no rows for a consumer pass
   through the barriers once. A glu tile has two passes, whose parts are apart in D. slots: address of the first slot;
   passes: a constant, of the tile. */
GMM__DEVICE void gmm_fp8_store_tiles(const gmm_fp8_args *args, const int boxes, const int passes,
                                     const gmm_fp8_tile *ring, uint32_t bars, uint32_t slot_bars, uint32_t slots) {
    const int lane = (int)threadIdx.x & 31, consumer = lane / boxes, box = lane % boxes;
    const uint32_t slot = slots + GMM_SM90_BOX_BYTES * (uint32_t)lane;
    const uint32_t empty = gmm_sm90_slot_empty(slot_bars, (uint32_t)consumer);
    const uint32_t full = gmm_sm90_slot_full(slot_bars, (uint32_t)consumer);
    uint32_t tile_index, part = 0;
    for (tile_index = 0;; tile_index++) {
        /* the scheduler overwrites the entry after this warp has left the tile: "Rules of FP8 tiles" (fp8_plan.cuh) */
        const gmm_fp8_tile *const f = &ring[tile_index % GMM_SM90_TILE_RING];
        int box_cols, cols, part_col = 0;
        gmm_mbarrier_wait(gmm_fp8_tile_full(bars, tile_index), tile_index / GMM_SM90_TILE_RING & 1);
        if (f->t.row_blocks == 0) break;
        box_cols = f->d_flags & GMM_FP8_D_16BIT ? 64 : 32;
        cols = f->t.row_blocks > consumer ? f->t.cols * passes : 0;
        do {
            const int x = part_col + box_cols * box, next = x + box_cols * boxes,
                      by_tma = (f->d_flags & GMM_FP8_D_TMA) && x < cols;
            const int reduce = (f->d_flags & GMM_FP8_D_REDUCE) && part_col > 0;
            const int32_t y = f->d_y + 64 * consumer;
            GMM__BULK_WAIT_GROUP_READ(0);
            if (by_tma && (f->d_flags & GMM_FP8_D_LOAD) && !reduce) {
                gmm_mbarrier_arrive_expect_tx(empty, GMM_SM90_BOX_BYTES);
                gmm_tma_load(slot, &args->d, empty, 0, f->t.n0 + x, y, f->d_z, f->d_w);
                if (next < cols && !(f->d_flags & GMM_FP8_D_REDUCE))
                    gmm_tma_prefetch_l2(&args->d, f->t.n0 + next, y, f->d_z, f->d_w);
            } else gmm_mbarrier_arrive(empty);
            gmm_mbarrier_wait(full, part++ & 1);
            if (by_tma) {
                gmm_tma_store(&args->d, slot, reduce,
                              passes > 1 ? gmm_fp8_glu_column(args, f->t.n0, part_col > 0) + box_cols * box
                                         : f->t.n0 + x,
                              y, f->d_z, f->d_w);
                gmm_bulk_commit_group();
            }
        } while ((part_col += box_cols * boxes) < cols);
    }
    GMM__BULK_WAIT_GROUP(0);
}

#ifndef GMM_NO_QUANT
#define GMM__BODY GMM__BODY_FP8
/* kernel, tag of the dtype of A, scaling of partial sums, tile, tiles of the kernel (0: functions of a tile without a
   kernel, which the next row calls), second tile */
#if GMM__HOLDS(2)
#define GMM__ROW (gmm_no_kernel, e4m3, 1d2d, 128x192, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_1d2d_192x128x128_128x192x128_sm90, e4m3, 1d2d, 192x128, 2, 128x192)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_1d2d_192x128x128_small_m_sm90, e4m3, 1d2d, 192x128_small_m, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_1d2d_128x192x128_small_m_sm90, e4m3, 1d2d, 128x192_small_m, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_1d1d_128x128x128_sm90, e4m3, 1d1d, 128x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_fast_128x192x128_sm90, e4m3, fast, 128x192, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(3)
#define GMM__ROW (gmm_no_kernel, e5m2, 1d2d, 128x192, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_1d2d_192x128x128_128x192x128_sm90, e5m2, 1d2d, 192x128, 2, 128x192)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_1d2d_192x128x128_small_m_sm90, e5m2, 1d2d, 192x128_small_m, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_1d2d_128x192x128_small_m_sm90, e5m2, 1d2d, 128x192_small_m, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_1d1d_128x128x128_sm90, e5m2, 1d1d, 128x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_fast_128x192x128_sm90, e5m2, fast, 128x192, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_glu_e4m3_1d2d_192x128x128_sm90, e4m3, 1d2d, 192x128_glu, 1, none)
#include GMM_KERNELS_FILE
#endif
#undef GMM__BODY

typedef struct gmm_fp8_kernel {
    gmm_dtype dtype;
    int32_t scaling, consumers, tile_n, predicts_first_tile, glu;
    int32_t tile_choice;         /* gmm_sm90_tile_choice */
    int32_t threads, smem_bytes; /* of the launch */
    const void *function;
    const char *name;
} gmm_fp8_kernel;

#if GMM__HOLDS(0)
#define GMM__X(dtype, tag, scaling, tile, first, tile_choice, kernel) GMM__DECLARE_KERNEL(kernel, gmm_fp8_args)
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
static const gmm_fp8_kernel gmm_fp8_kernels[] = {
#define GMM__X(dtype, tag, scaling_, tile, first, tile_choice, kernel) \
    { dtype, GMM__FP8(scaling, scaling_), GMM__FP8(consumers, tile), GMM__FP8(tile_n, tile), \
      GMM__FP8(predicts_first_tile, tile), GMM__FP8(glu, tile), \
      gmm_sm90_tile_##tile_choice, GMM__FP8(threads, first), \
      (int32_t)sizeof(GMM__FP8_INSTANCE(smem, tag, scaling_, first)), \
      (const void *)kernel, #kernel },
    GMM_FP8_KERNEL_LIST(GMM__X)
    GMM_FP8_SPLIT_LIST(GMM__X)
#undef GMM__X
};
enum { GMM_FP8_KERNELS = (int)(sizeof gmm_fp8_kernels / sizeof gmm_fp8_kernels[0]) };

/* Map of a COLUMNWISE copy of tokens, whose lines are `along` padded rows long. */
static GMM__UNUSED int gmm_fp8_map_columnwise(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map,
                                              const gmm_kmat *m, int64_t along, int64_t lines, int32_t box_lines) {
    cuuint64_t dims[4] = { 0, 0, 1, 1 }, strides[3] = { 0, 16, 16 };
    dims[0] = (cuuint64_t)along;
    dims[1] = (cuuint64_t)lines;
    strides[0] = (cuuint64_t)m->ld;
    return gmm_sm90_map(encode, map, m->dtype, m->data, dims, strides, box_lines, 0);
}

/* Encodes the tensor maps and launches the kernel with at most `blocks` CTAs. `args` is complete but for the
   maps; operands and their rows are 16-byte aligned. */
static GMM__UNUSED cudaError_t gmm_launch_fp8(PFN_cuTensorMapEncodeTiled_v12000 encode, int32_t kernel, int32_t blocks,
                                              gmm_fp8_args *args, cudaStream_t stream) {
    const gmm_fp8_kernel *row = &gmm_fp8_kernels[kernel];
    const gmm_gemm_args *p = &args->p;
    const int32_t columns = p->n * (1 + row->glu); /* of D, which are B's rows; p->n of a glu product are those of h */
    /* a tensor map has no empty dimension */
    const int64_t rows = args->groups.capacity > 0 ? args->groups.capacity : 1;
    const int64_t padded = gmm_padded_capacity(p->groups, rows);
    int mapped;
    if (args->wgrad)
        mapped = gmm_fp8_map_columnwise(encode, &args->a, &p->a, padded, p->m, GMM_FP8_BLOCK_ROWS) &&
                 gmm_fp8_map_columnwise(encode, &args->b, &p->b, padded, p->n, 64);
    else
        mapped = gmm_sm90_map_tokens(encode, &args->a, &p->a, p->k, GMM_FP8_BLOCK_ROWS) &&
                 gmm_sm90_map_matrix(encode, &args->b, &p->b, p->k, columns, 64, 1);
    /* D without 16-byte aligned rows has no map; the kernel checks the same condition */
    if (mapped && p->d.ld * gmm_dtype_bits(p->d.dtype) % 128 == 0) {
        if (args->wgrad) mapped = gmm_sm90_map_matrix(encode, &args->d, &p->d, p->n, p->m, GMM_FP8_BLOCK_ROWS, 0);
        else if ((uintptr_t)p->d.data % 16 == 0)
            mapped = gmm_sm90_map_tokens(encode, &args->d, &p->d, columns, GMM_FP8_BLOCK_ROWS);
    }
    if (!mapped) return cudaErrorInvalidValue;
    args->tile_choice = row->tile_choice;
    return gmm_launch_clusters(row->function, blocks, row->threads, row->smem_bytes, args, stream);
}
#endif /* GMM__HOLDS(0) */
#endif /* GMM_NO_QUANT */

