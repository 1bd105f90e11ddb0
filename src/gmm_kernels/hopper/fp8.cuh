/* ............................................................................ Grouped FP8 products on Hopper ... */

/* Products of FP8 copies, whose lines run along the contraction: fwd x and w ROWWISE, dgrad dy ROWWISE and w
   COLUMNWISE, wgrad dy and x COLUMNWISE. Clusters and multicast are those of the 16-bit products (tables.cuh). The tile
   ring is too, except that its readers do not release its entries: the scheduler writes tile n when the producer has
   begun tile n - 8. A stage is 128 elements long. Without swap_ab: wgmma's A are D's rows (E4M3 or E5M2), its B are
   D's columns (E4M3); each consumer warp group has 64 rows of the tile and all of its columns.

   Warp roles: consumers (warp groups 0 to 1 or 2), then four warps with few registers: producer, scale loader,
   scheduler, store. The tile list has the registers of consumers and of the other warps.

   Pipeline. An arrow is a barrier, which its left side completes and its right side waits for:
       scheduler    --tile_full[16]-->  all others;  producer  --tile_begun[16]-->  scheduler
       producer, scale loader  --full[stage]-->  consumers  --empty[stage]-->  producer, scale loader (of both CTAs
                                                                               where an operand is multicast)
       store        --slot.empty[consumer]-->  consumer  --slot.full[consumer]-->  store
       scheduler    --prediction.full-->  producer, scale loader, consumers (the predicted first tile)
       scheduler of the other CTA  --prediction.peer_full-->  scheduler

   mbarriers. S: stages; n: stage number of all tiles, tile number, or part of D that the consumer stores.
       barrier             completed by, arrivals per phase                         waited for by        parity of wait
       full[n % S]         producer lane 0 (1, and the bytes of the TMA boxes);     consumers            n / S
                           with scales also the scale loader: 1d2d its lanes
                           (33), 1d1d lane 0 (2)
       empty[n % S]        consumer warps of all CTAs of the cluster (4 consumers   producer,            n / S + 1
                           x cluster size)                                          scale loader
       tile_full[n % 16]   scheduler lane 0 (1)                                     all other warps      n / 16
       tile_begun[n % 16]  producer lane 0, when it begins tile n (1). No reader    scheduler, for       n / 16
                           releases an entry: see gmm_fp8_store_tiles               tile n + 8
       slot[c].empty       store lanes of consumer c, a box each (store_boxes),     consumer c           n
                           with old D where it is loaded
       slot[c].full        threads of consumer c (128)                              store lanes of c     n
       prediction.full     scheduler lane 0 (1)                                     producer, scale      0
                                                                                    loader, consumers
       prediction.peer_full  this CTA's scheduler and 4 bytes from the other's      scheduler            0
                           (1, st.async)
   Named barriers (GMM_BAR_*): CONSUMER + i joins consumer i; ORDER + i lets consumer i issue a stage of 1d1d.

   Accumulators. Not swap_ab: gmm_wgmma_acc_m is the row of D within a consumer's 64, gmm_wgmma_acc_n the column.

   Shared memory, in KiB: stages of B and A; store slots per consumer; then barriers, tile ring, tables and scales.
       192x128, small_m, glu  4 x (16 + 24)   3 x 16       128x192 and small_m    4 x (24 + 16)   2 x 24
       128x128                4 x (16 + 16)   2 x 32

   Promotion. The tensor cores keep 14 bits of an FP8 sum. Unless the caller allows less (fast), the partial sum of
   every stage is added to an fp32 accumulator, times the block's scales: 1d2d multiplies by a scale per row and one per
   128 columns, 1d1d by a scale per row and one per column, whose products a bf16 wgmma computes
   (gmm_fp8_scale_fragment). The scale loader brings them to shared memory with the stage. Scales of whole tensors
   and of lines are applied once, in the epilogue.

   Epilogue. A consumer writes its accumulators to its store slot, from which the store warp moves them to D by TMA
   while the next tile is multiplied. Where beta is not 0, TMA loads old fp32 D into the slot before. Where a tile
   passes its slot in several parts, each later part would wait for its load. For long sums with beta 1, TMA therefore
   adds later parts to D itself (reduction, 1.3 TB/s), which no warp waits for. Consumers store D themselves where its
   rows are not 16-byte aligned, and where beta is not 0 and D has 16 bits.

   glu tiles compute h = p act(D), as those of 16 bits do, and quantize it by 1x128 (gmm_fp8_glu). They take twice the
   stages, and pass their slot twice: TMA stores the gate columns of D from it, then h takes their memory, and then the
   linear columns. */
typedef struct gmm_fp8_args {
    CUtensorMap a, b, d;      /* boxes: A 64 rows, B 64 rows, D 64 rows of 128 bytes */
    gmm_gemm_args p;          /* its offsets and tiles are not read; a and b are the copies' codes */
    gmm_groups groups;        /* splits in device memory */
    gmm_mat a_scale, b_scale; /* scaling, scale, scale_table in device memory */
    int32_t *tables;          /* group tables in the workspace where shared memory has too few entries, else NULL */
    int32_t wgrad;            /* the operation is wgrad: both operands are COLUMNWISE copies of tokens */
    int32_t b_columnwise;     /* b is a COLUMNWISE copy: dgrad's weight */
    gmm_fp8_glu glu;          /* tiles with `glu` */
} gmm_fp8_args;

enum { GMM_FP8_BLOCK_ROWS = 64 }; /* rows of a tile per consumer */
enum { GMM_FP8_SCALE_BLOCK_BYTES = 128 }; /* bytes of the scales of 8 columns of D in 1d1d, a line of 16 bytes each */

/* Tiles, rows x columns of D: X(tag, consumers, columns, stages, boxes of 64 rows x 128 bytes in a store slot, groups
   whose tables fit into shared memory, registers of consumers, registers of the other warps, whether fwd and dgrad
   predict the first tile of a CTA, whether operands may have a scale per line, whether it is a glu tile). Tags end in
   _small_m where the first tile is predicted, which is for few tokens: with many, 192x128 loses up to 4% by it. So is
   the glu tile, which loses with many tokens anyhow. This is not the small-M mode of the 16-bit products. The store
   slots of 128x128, the tile of 1d1d, hold a whole fp32 tile. */
#define GMM_FP8_TILE_LIST(X) \
    X(192x128, 3, 128, 4, 2, 256, 152, 56, 0, 1, 0) \
    X(192x128_small_m, 3, 128, 4, 2, 256, 152, 56, 1, 1, 0) \
    X(128x192, 2, 192, 4, 3, 256, 224, 56, 0, 1, 0) \
    X(128x192_small_m, 2, 192, 4, 3, 256, 224, 56, 1, 1, 0) \
    X(128x128, 2, 128, 4, 4, 256, 216, 72, 0, 0, 0) \
    X(192x128_glu, 3, 128, 4, 2, 256, 152, 56, 1, 0, 1)

/* Scaling of partial sums: X(tag, value, bytes of column scales of a stage per tile, per column of the tile, arrivals
   of the scale loader at a full barrier). GMM__FP8_HAS_STAGE_SCALES_<tag>: whether stages can have scales. */
enum { GMM_FP8_FAST, GMM_FP8_1D2D, GMM_FP8_1D1D };
#define GMM_FP8_SCALING_LIST(X) \
    X(fast, GMM_FP8_FAST, 16, 0, 0) \
    X(1d2d, GMM_FP8_1D2D, 16, 0, 32) \
    X(1d1d, GMM_FP8_1D1D, 0, 16, 1)
#define GMM__FP8_IS_FAST_fast 1
#define GMM__FP8_IS_FAST_1d2d 0
#define GMM__FP8_IS_FAST_1d1d 0
#define GMM__FP8_IS_1D1D_fast 0
#define GMM__FP8_IS_1D1D_1d2d 0
#define GMM__FP8_IS_1D1D_1d1d 1
#define GMM__FP8_HAS_STAGE_SCALES_fast 0
#define GMM__FP8_HAS_STAGE_SCALES_1d2d 1
#define GMM__FP8_HAS_STAGE_SCALES_1d1d 1

/* Instances: X(dtype of A, tag, scaling, tile, kernel). The includes in fp8_kernels.cuh follow the same list. A kernel
   serves fwd, dgrad and wgrad, so its name has no operation but glu. */
#define GMM_FP8_KERNEL_LIST(X) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128, gmm_gemm_e4m3_1d2d_192x128x128_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 192x128, gmm_gemm_e5m2_1d2d_192x128x128_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128_small_m, gmm_gemm_e4m3_1d2d_192x128x128_small_m_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 192x128_small_m, gmm_gemm_e5m2_1d2d_192x128x128_small_m_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 128x192_small_m, gmm_gemm_e4m3_1d2d_128x192x128_small_m_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 128x192_small_m, gmm_gemm_e5m2_1d2d_128x192x128_small_m_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128_glu, gmm_gemm_glu_e4m3_1d2d_192x128x128_sm90) \
    X(GMM_E4M3, e4m3, 1d1d, 128x128, gmm_gemm_e4m3_1d1d_128x128x128_sm90) \
    X(GMM_E5M2, e5m2, 1d1d, 128x128, gmm_gemm_e5m2_1d1d_128x128x128_sm90) \
    X(GMM_E4M3, e4m3, fast, 128x192, gmm_gemm_e4m3_fast_128x192x128_sm90) \
    X(GMM_E5M2, e5m2, fast, 128x192, gmm_gemm_e5m2_fast_128x192x128_sm90)

#define GMM__FP8(name, tag) GMM__CAT(gmm_fp8_##name##_, tag) /* a constant or type of a tile or of a scaling */
#define GMM__FP8_INSTANCE(name, tag, scaling, tile) gmm_fp8_##name##_##tag##_##scaling##_##tile
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, groups_, consumer_regs_, others_, predicts_, lines_, glu_) \
    GMM__FP8(consumers, tag) = consumers_, GMM__FP8(tile_n, tag) = tile_n_, GMM__FP8(stages, tag) = stages_, \
    GMM__FP8(store_boxes, tag) = boxes_, GMM__FP8(smem_groups, tag) = groups_, \
    GMM__FP8(predicts_first_tile, tag) = predicts_, GMM__FP8(lines, tag) = lines_, GMM__FP8(glu, tag) = glu_, \
    GMM__FP8(consumer_regs, tag) = consumer_regs_, GMM__FP8(other_regs, tag) = others_, \
    GMM__FP8(threads, tag) = 128 * (consumers_) + 128,
enum { GMM_FP8_TILE_LIST(GMM__X) gmm_fp8_tiles_end };
#undef GMM__X
#define GMM__X(tag, value, tile_, column_, arrivals_) \
    GMM__FP8(scaling, tag) = value, GMM__FP8(tile_scales, tag) = tile_, GMM__FP8(column_scales, tag) = column_, \
    GMM__FP8(loader_arrivals, tag) = arrivals_,
enum { GMM_FP8_SCALING_LIST(GMM__X) gmm_fp8_scaling_end };
#undef GMM__X

/* How a tile is stored: 16BIT the store slot holds 16-bit elements, else fp32 sums; TMA by the store warp, else by the
   consumers; LOAD added to old D, which TMA loads into the slot; REDUCE (besides LOAD) later parts are added to D by
   TMA instead. */
enum { GMM_FP8_D_16BIT = 1, GMM_FP8_D_TMA = 2, GMM_FP8_D_LOAD = 4, GMM_FP8_D_REDUCE = 8 };
/* The bits of d_flags from this one on: where the outer scale is two factors, the biased exponent of the second, which
   is a power of two; else 0. */
enum { GMM_FP8_SECOND_SCALE_SHIFT = 8 };
enum { GMM_FP8_REDUCE_K = 768 }; /* least contraction whose products hide TMA's additions to D */

/* A work tile of the FP8 products. */
typedef struct gmm_fp8_tile {
    gmm_sm90_tile t;
    int32_t padded_row;    /* where its group starts in padded copies */
    float outer_scale;     /* what all of its sums are multiplied by */
    int32_t d_flags;       /* how it is stored: GMM_FP8_D_*, and the second factor of outer_scale */
    int32_t d_y, d_z, d_w; /* the last three TMA coordinates of its first row in D */
} gmm_fp8_tile;

/* Barriers besides those of stages and slots. */
typedef struct gmm_fp8_barriers {
    uint64_t tile_full[GMM_SM90_TILE_RING];  /* an entry of the tile ring has been written */
    uint64_t tile_begun[GMM_SM90_TILE_RING]; /* the producer has begun tile n: the scheduler may write tile n + 8 */
} gmm_fp8_barriers;
/* Of kernels with a predicted first tile. */
typedef struct gmm_fp8_prediction {
    uint64_t full;             /* the predicted tile lies in the ring's last entry */
    uint64_t peer_full;        /* the other CTA of the cluster has written peer_mispredicted */
    int32_t peer_mispredicted; /* whether its prediction was wrong */
    int32_t reserved[3];
} gmm_fp8_prediction;

/* Shared memory: one struct per scaling and tile, made from the columns of the lists. A stage holds operands as TMA
   writes them, in boxes of lines of 128 bytes with 128-byte swizzle. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, groups_, consumer_regs_, others_, predicts_, lines_, glu_) \
    typedef struct GMM__FP8(stage, tag) { \
        char b[(tile_n_) / 64][GMM_SM90_BOX_BYTES]; /* [64 columns] */ \
        char a[consumers_][GMM_SM90_BOX_BYTES];     /* [64 rows] */ \
    } GMM__FP8(stage, tag);
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
/* Scales per line, of a consumer's rows and of the tile's columns; 1 if absent. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, groups_, consumer_regs_, others_, predicts_, lines_, glu_) \
    typedef struct GMM__FP8(line_scales, tag) { \
        float row[(lines_) ? GMM_FP8_BLOCK_ROWS : 4], col[(lines_) ? (tile_n_) : 4]; \
    } GMM__FP8(line_scales, tag);
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, groups_, consumer_regs_, others_, predicts_, lines_, glu_) \
    typedef struct GMM__FP8(tile_smem, tag) { \
        GMM__FP8(stage, tag) stage[stages_]; char slot[consumers_][boxes_][GMM_SM90_BOX_BYTES]; \
        gmm_sm90_stage_barriers stage_bars[stages_]; gmm_fp8_barriers bars; \
        gmm_sm90_slot_barriers slot_bars[consumers_]; GMM__IF(predicts_, gmm_fp8_prediction prediction;) \
        gmm_fp8_tile ring[GMM_SM90_TILE_RING]; \
        int32_t ends[(groups_) + 1], work_ends[(groups_) + 1], padded_starts[(groups_) + 1]; \
        alignas(16) GMM__FP8(line_scales, tag) line_scales[consumers_]; } GMM__FP8(tile_smem, tag);
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
/* Sizes and offsets in bytes; prediction_offset is 0 where a tile has none. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, groups_, consumer_regs_, others_, predicts_, lines_, glu_) \
    GMM__FP8(a_offset, tag) = offsetof(GMM__FP8(stage, tag), a), \
    GMM__FP8(stage_bytes, tag) = sizeof(GMM__FP8(stage, tag)), \
    GMM__FP8(slot_bytes, tag) = (boxes_) * GMM_SM90_BOX_BYTES, \
    GMM__FP8(line_scale_bytes, tag) = sizeof(GMM__FP8(line_scales, tag)), \
    GMM__FP8(prediction_offset, tag) = GMM__IF(predicts_, offsetof(GMM__FP8(tile_smem, tag), prediction) +) 0,
enum { GMM_FP8_TILE_LIST(GMM__X) gmm_fp8_tile_smem_end };
#undef GMM__X
/* The scales of a stage: of rows, then of columns. With 1d2d two floats for columns, of those up to the next multiple
   of 128 and of those behind it; with 1d1d an operand of wgmma (gmm_fp8_store_column_scale). */
#define GMM__X(dtype, tag, scaling, tile_, kernel) \
    typedef struct GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_) { \
        float row[GMM__FP8(consumers, tile_)][GMM_FP8_BLOCK_ROWS]; \
        char col[GMM__FP8(tile_scales, scaling) + GMM__FP8(column_scales, scaling) * GMM__FP8(tile_n, tile_)]; \
    } GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_);
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
/* unread: wgmma reads every line of column scales twice, which compute-sanitizer takes for one read of twice as many
   bytes; behind the last stage these are within the struct. */
#define GMM__X(dtype, tag, scaling, tile_, kernel) \
    typedef struct GMM__FP8_INSTANCE(smem, tag, scaling, tile_) { \
        GMM__FP8(tile_smem, tile_) tile; \
        GMM__IF(GMM__FP8_HAS_STAGE_SCALES_##scaling, \
                GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_) scales[GMM__FP8(stages, tile_)];) \
        GMM__IF(GMM__FP8_IS_1D1D_##scaling, char unread[GMM__FP8(column_scales, scaling) * GMM__FP8(tile_n, tile_)];) \
    } GMM__FP8_INSTANCE(smem, tag, scaling, tile_);
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling, tile_, kernel) \
    static_assert(sizeof(GMM__FP8_INSTANCE(smem, tag, scaling, tile_)) <= 232448, \
                  #kernel ": a CTA has at most 227 KiB of shared memory");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling_, tile_, kernel) \
    static_assert(!GMM__FP8(glu, tile_) || (int)GMM__FP8(scaling, scaling_) == GMM_FP8_1D2D, \
                  #kernel ": a glu product is by blocks");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
/* What addresses and TMA assume of the layout. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, groups_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert(GMM__FP8(stage_bytes, tag) % 1024 == 0 && GMM__FP8(a_offset, tag) % 1024 == 0 && \
                  offsetof(GMM__FP8(tile_smem, tag), slot) % 1024 == 0, \
                  "tile " #tag ": operands and slots begin at multiples of 1024 bytes, 8 lines of the swizzle");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, groups_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert(offsetof(GMM__FP8(tile_smem, tag), padded_starts) - offsetof(GMM__FP8(tile_smem, tag), ends) == \
                      8 * ((groups_) + 1), \
                  "tile " #tag ": the tables follow one another as in the workspace"); \
    static_assert(offsetof(GMM__FP8(tile_smem, tag), line_scales) % 16 == 0 && \
                  sizeof(GMM__FP8(tile_smem, tag)) % 16 == 0, \
                  "tile " #tag ": scales are read by vectors of 16 bytes");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X

/* Bytes of a CTA's group tables (ends, work_ends, padded starts) in the workspace. */
static GMM__UNUSED size_t gmm_fp8_table_bytes(int64_t groups) { return 12 * ((size_t)groups + 1); }

/* Copies a float to shared memory asynchronously (cp.async), or +0 where `present` is 0. */
GMM__DEVICE void gmm_cp_async_f32(uint32_t smem, const float *from, int present) {
    gmm_cp_async_4_zfill(smem, __cvta_generic_to_global(from), present ? 4 : 0);
}

/* Products of scales in 1d1d. A bf16 tensor core multiplies a column of row scales by a row of column scales, into
   accumulators that lie as those of the product do. An fp32 scale is the sum of three bf16, its parts of 8 bits each,
   and of K = 16 products nine are those of a part by a part. A column's line of B has 16 bytes and is read twice, as K
   = 0 to 7 and as K = 8 to 15. By number of the part, - is 0:
       B, column          0 1 2 - 0 1 2 -
       A, row, first K    0 0 0 0 2 2 2 2
       A, row, second K   1 1 1 1 - - - -
   A power of two has one part, and the product of two of them is exact. */
GMM__DEVICE float gmm_fp8_leading_part(float scale) {
    return gmm_f32_from_bits(__float_as_uint(scale) & 0xFFFF0000u);
}
/* The fragment of A of a thread, whose rows have these scales: lane l holds K = 2 (l % 4), and the next one. */
GMM__DEVICE void gmm_fp8_scale_fragment(const float scales[2], uint32_t a[4]) {
    const int left = (threadIdx.x & 3) < 2;
    int e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        const float rest = scales[e] - gmm_fp8_leading_part(scales[e]);
        const float third = rest - gmm_fp8_leading_part(rest);
        a[e] = __byte_perm(__float_as_uint(left ? scales[e] : third), 0, 0x3232);
        a[2 + e] = left ? __byte_perm(__float_as_uint(rest), 0, 0x3232) : 0;
    }
}
/* Writes a column's line of B. */
GMM__DEVICE void gmm_fp8_store_column_scale(uint32_t smem, float scale) {
    const float first = gmm_fp8_leading_part(scale), rest = scale - first, second = gmm_fp8_leading_part(rest);
    const uint32_t low = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
    const uint32_t high = __float_as_uint(rest - second) >> 16;
    gmm_st_shared_v4_u32(smem, low, high, low, high);
}

/* Addresses of barriers of the tile ring. */
GMM__DEVICE uint32_t gmm_fp8_tile_full(uint32_t bars, uint32_t tile_index) {
    return bars + GMM__OFFSET(gmm_fp8_barriers, tile_full) +
           GMM_SM90_MBARRIER_BYTES * (tile_index % GMM_SM90_TILE_RING);
}
GMM__DEVICE uint32_t gmm_fp8_tile_begun(uint32_t bars, uint32_t tile_index) {
    return bars + GMM__OFFSET(gmm_fp8_barriers, tile_begun) +
           GMM_SM90_MBARRIER_BYTES * (tile_index % GMM_SM90_TILE_RING);
}
/* Waits for tile number `tile_index` of the ring. predicted: the predicted first tile instead, which lies in the ring's
   last entry; prediction: address of the gmm_fp8_prediction. */
GMM__DEVICE const gmm_fp8_tile *gmm_fp8_wait_tile(const gmm_fp8_tile *ring, uint32_t bars, uint32_t prediction,
                                                  uint32_t tile_index, int predicted) {
    const gmm_fp8_tile *const f = &ring[predicted ? GMM_SM90_TILE_RING - 1 : tile_index % GMM_SM90_TILE_RING];
    gmm_mbarrier_wait(predicted ? prediction + GMM__OFFSET(gmm_fp8_prediction, full)
                                : gmm_fp8_tile_full(bars, tile_index), tile_index / GMM_SM90_TILE_RING & 1);
    return f;
}

/* Stages of a tile. An empty contraction takes one stage without a load: a tile has at least one stage, because stages
   bound how far the producer, and with it the scheduler, is ahead of the consumers. */
GMM__DEVICE uint32_t gmm_fp8_k_tiles(int32_t k) { return k > 0 ? (uint32_t)(k + 127) / 128 : 1; }

/* Prefix sums [G + 1] of the groups' rows in padded copies. Whole warp. */
GMM__DEVICE void gmm_fp8_padded_starts(int32_t groups, const int32_t *ends, int32_t *starts) {
    int32_t total = 0, g;
    const int32_t last = gmm_sm90_lane_groups(groups, &g);
#pragma unroll 1
    for (; g < last; g++)
        starts[g + 1] = total += (ends[g + 1] - ends[g] + GMM_GROUP_ROWS - 1) / GMM_GROUP_ROWS * GMM_GROUP_ROWS;
    gmm_sm90_prefix_sums(groups, total, starts);
}

/* First row of B, and column of D, of a glu tile whose first column of h is n0: the gate's in pass 0, the linear ones'
   in pass 1. */
GMM__DEVICE int32_t gmm_fp8_glu_column(const gmm_fp8_args *args, int32_t n0, int32_t pass) {
    const int32_t block = args->glu.block;
    return n0 / block * 2 * block + n0 % block + pass * block;
}

/* Address of the first scale of a tile's group. *step: floats from a block along the contraction to the next; *block:
   floats from 128 columns of D to the next 128. Lines of A are D's rows, lines of B are D's columns. glu: a constant,
   of the tile. */
GMM__DEVICE const float *gmm_fp8_scales_a(const gmm_fp8_args *args, const gmm_fp8_tile *t, int64_t *step) {
    const gmm_direction direction = args->wgrad ? GMM_COLUMNWISE : GMM_ROWWISE;
    const gmm__qview v = gmm__qview_of(&args->a_scale, direction, 1, t->t.g, t->t.row, t->padded_row,
                                       t->t.end - t->t.row, args->wgrad ? args->p.m : args->p.k);
    *step = gmm__qview_scale(&v, 0, 1);
    return (const float *)(const void *)v.scale;
}
GMM__DEVICE const float *gmm_fp8_scales_b(const gmm_fp8_args *args, const int passes, const gmm_fp8_tile *t,
                                          int64_t *step, int64_t *block) {
    const gmm_direction direction = args->wgrad || args->b_columnwise ? GMM_COLUMNWISE : GMM_ROWWISE;
    const int64_t rows = args->wgrad ? t->t.end - t->t.row
                         : args->b_columnwise ? args->p.k : args->p.n * (int64_t)passes;
    const int64_t cols = args->b_columnwise || args->wgrad ? args->p.n : args->p.k;
    const gmm__qview v = gmm__qview_of(&args->b_scale, direction, args->wgrad, t->t.g, args->wgrad ? t->t.row : 0,
                                       args->wgrad ? t->padded_row : 0, rows, cols);
    *step = gmm__qview_scale(&v, 0, 1);
    *block = gmm__qview_scale(&v, 128, 0);
    return (const float *)(const void *)v.scale;
}

/* Sets how a tile is stored: d_flags and the coordinates in D. The tile's outer scale becomes 1. Rows of D have a
   multiple of 16 elements, so that they end at multiples of 16 bytes, as TMA stores require. */
GMM__DEVICE void gmm_fp8_plan_store(const gmm_fp8_args *args, gmm_fp8_tile *f) {
    const char *const d = gmm_kmat_data(&args->p.d, f->t.g);
    const int32_t map_z = gmm_sm90_map_z(gmm_sm90_map_offset(d)), map_w = gmm_sm90_map_w(gmm_sm90_map_offset(d));
    const int size = gmm_kmat_size(&args->p.d);
    const float beta = gmm_gemm_beta(&args->p, f->t.g);
    f->outer_scale = 1.0f; /* gmm_fp8_plan_outer_scale writes another where there is one */
    f->d_flags = size == 2 && beta == 0.0f ? GMM_FP8_D_16BIT : 0;
    if ((((uint64_t)(uintptr_t)d | (uint64_t)(args->p.d.ld * size)) & 15) == 0 && (beta == 0.0f || size == 4)) {
        f->d_flags |= GMM_FP8_D_TMA | (beta == 0.0f ? 0 : GMM_FP8_D_LOAD);
        if (beta == 1.0f && f->t.k >= GMM_FP8_REDUCE_K) f->d_flags |= GMM_FP8_D_REDUCE;
    }
    f->d_y = f->t.m0 + (args->wgrad ? 0 : GMM_SM90_RAGGED_ROWS - (f->t.end - f->t.row));
    f->d_z = args->wgrad ? map_z : f->t.end;
    f->d_w = args->wgrad ? map_w : GMM_SM90_RAGGED_ROWS;
}

/* Per-tensor scale of a group in A and in B; 1 where the operand has none. */
GMM__DEVICE float gmm_fp8_tensor_scale_a(const gmm_fp8_args *args, int32_t g) {
    return args->a_scale.scaling == GMM_SCALING_TENSOR ? ((const float *)args->a_scale.scale)[g] : 1.0f;
}
GMM__DEVICE float gmm_fp8_tensor_scale_b(const gmm_fp8_args *args, int32_t g) {
    if (args->b_scale.scaling != GMM_SCALING_TENSOR) return 1.0f;
    return args->b_scale.scale_table ? *(const float *)args->b_scale.scale_table[g]
                                     : ((const float *)args->b_scale.scale)[g];
}

/* Whether sums have an outer scale: alpha, or a scale per tensor. */
GMM__DEVICE int gmm_fp8_has_outer_scale(const gmm_fp8_args *args) {
    return args->p.alpha || args->a_scale.scaling == GMM_SCALING_TENSOR || args->b_scale.scaling == GMM_SCALING_TENSOR;
}

/* Sets the outer scale of a tile in the ring: the factor of all sums of its group, that is alpha times per-tensor
   scales. An empty sum stays +0 whatever the sign of alpha. Where a partial product leaves the range of normal numbers,
   the scale becomes two factors, the second a power of two; the scheduler warp computes them, so that consumers spend
   no time on it. `f` is the tile in the ring, since the scheduler warp has no registers left for the scale. */
GMM__DEVICE void gmm_fp8_plan_outer_scale(const gmm_fp8_args *args, gmm_fp8_tile *f) {
    const int32_t g = f->t.g;
    float alpha = 1.0f, alpha_a, scale;
    if (f->t.row_blocks == 0 || f->t.cols <= 0 || f->t.k == 0) return;
    if (args->p.alpha) alpha = args->p.alpha[args->p.alpha_per_group ? g : 0];
    alpha_a = __fmul_rn(alpha, gmm_fp8_tensor_scale_a(args, g));
    scale = __fmul_rn(alpha_a, gmm_fp8_tensor_scale_b(args, g));
    if (__builtin_expect(!gmm__scale_normal(alpha_a) || !gmm__scale_normal(scale), 0)) {
        const gmm__scale product = gmm__scale_times(gmm__scale_of(alpha), gmm_fp8_tensor_scale_a(args, g));
        float second;
        scale = gmm__scale_split(gmm__scale_times(product, gmm_fp8_tensor_scale_b(args, g)), &second);
        f->d_flags |= (int32_t)(gmm_f32_bits(second) >> 23) << GMM_FP8_SECOND_SCALE_SHIFT;
    }
    f->outer_scale = scale;
}

/* Predicted first tile. The scheduler chooses the CTA's first tile by the split that it reads before
   griddepcontrol.wait; the producer loads the tile's operands right after the wait, and consumers multiply them.
   Meanwhile the scheduler reads the split again. If the prediction was wrong, the result is discarded and the CTA takes
   its true first tile after all others. CTAs of a cluster pass stages to one another and must take the same number of
   them: an empty tile takes as many stages as a real one, and where one CTA repeats its first tile, the other takes one
   more empty tile. */

/* A tile without rows or columns that takes the stages of a real one. */
GMM__DEVICE void gmm_fp8_empty_tile(const gmm_fp8_args *args, gmm_fp8_tile *f) {
    memset(f, 0, sizeof *f);
    f->t.row_blocks = 1;
    f->t.k = args->p.k;
}

/* gmm_sm90_read_split, gmm_sm90_tiles_n, gmm_sm90_count_work and gmm_fp8_padded_starts for fwd and dgrad in one pass: a
   lane issues the loads of the entries of its groups, `lane_groups` at most, together, so that their latency is paid
   once. Returns the tiles along the columns of D, or 0 where `known` is set and s->ends still describe the split. Whole
   warp. */
enum { GMM_FP8_LANE_GROUPS = 4 };
/* Rules of FP8 tiles. The store warp reads tile n until consumers end tile n + 1; the producer may by then have begun
   tile n + 2 + stages. The scheduler overwrites tile n when the producer has begun tile n + GMM_SM90_TILE_RING / 2. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, groups_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert((stages_) + 3 <= GMM_SM90_TILE_RING / 2, "tile " #tag ": the ring is too short for its stages"); \
    static_assert(128 * ((consumers_) * (consumer_regs_) + (others_)) <= 65536 && (consumer_regs_) % 8 == 0 && \
                  (others_) % 8 == 0, "tile " #tag ": a multiprocessor has 65536 registers"); \
    static_assert((consumers_) * (boxes_) <= 32 && (tile_n_) / 64 + (consumers_) <= 32, \
                  "tile " #tag ": a lane stores or loads one box"); \
    static_assert(!(predicts_) || (groups_) >= 32 * GMM_FP8_LANE_GROUPS, \
                  "tile " #tag ": a tile that predicts has its group tables in shared memory");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, groups_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert(!(glu_) || ((tile_n_) == 128 && (boxes_) == 2 && !(lines_)), \
                  "tile " #tag ": a glu tile has the columns of a 1x128 scale, and the gate fills a store slot");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
GMM__DEVICE int32_t gmm_fp8_plan_tiles(const gmm_fp8_args *args, const gmm_sm90_scheduler *s,
                                       const int lane_groups, int known, int32_t tile_n) {
    int32_t *const ends = s->ends, *const work_ends = s->work_ends, *const starts = s->padded_starts;
    const int32_t cluster_size = (int32_t)gmm_cluster_nctarank();
    const int by_offsets = args->groups.form == GMM_SPLIT_OFFSETS;
    const int32_t lane = (int32_t)threadIdx.x & 31;
    gmm_sm90_split_stats stats = { 0, 0 };
    int32_t entries[GMM_FP8_LANE_GROUPS], end = 0, work = 0, padded = 0, first = lane, tiles_n, i, j;
    const int32_t last = lane_groups > 1 ? gmm_sm90_lane_groups(args->p.groups, &first)
                                         : min(lane + 1, args->p.groups);
    int changed = !known;
#pragma unroll
    for (j = 0; j < lane_groups; j++) /* zero past the last group */
        entries[j] = first + j < last ? gmm_sm90_split_entry(&args->groups, first + j + by_offsets) : 0;
#pragma unroll
    for (j = 0; j < lane_groups; j++)
        if (known && first + j < last)
            changed |= entries[j] != ends[first + j + 1] - (by_offsets ? 0 : ends[first + j]);
    if (!__any_sync(0xFFFFFFFFu, changed)) return 0;
    __syncwarp(); /* all lanes have read the ends */
#pragma unroll
    for (j = 0; j < lane_groups; j++) end = gmm_sm90_split_end(&args->groups, end, entries[j]);
#pragma unroll
    for (i = 1; i < 32; i *= 2) {
        const int32_t before = __shfl_up_sync(0xFFFFFFFFu, end, (unsigned)i);
        if (lane >= i) end = gmm_sm90_split_end(&args->groups, before, end);
    }
    end = __shfl_up_sync(0xFFFFFFFFu, end, 1);
    if (lane == 0) end = ends[0] = work_ends[0] = starts[0] = 0;
#pragma unroll
    for (j = 0; j < lane_groups; j++) {
        const int32_t start = end;
        end = gmm_sm90_split_end(&args->groups, end, entries[j]);
        stats.max_rows = max(stats.max_rows, end - start);
        stats.nonempty += end > start;
        if (first + j < last) ends[first + j + 1] = end;
    }
    stats.max_rows = __reduce_max_sync(0xFFFFFFFFu, stats.max_rows);
    stats.nonempty = __reduce_add_sync(0xFFFFFFFFu, stats.nonempty);
    tiles_n = gmm_sm90_tiles_n(&args->p, (args->p.n + tile_n - 1) / tile_n, s->col_align,
                               s->block_rows * s->max_blocks, cluster_size, stats);
    __syncwarp();
#pragma unroll 1
    for (j = first; j < last; j++) {
        const int32_t m = ends[j + 1] - ends[j];
        work_ends[j + 1] = work += gmm_sm90_group_work(gmm_sm90_tile_count(m, s->block_rows, s->max_blocks),
                                                       tiles_n, cluster_size, s->cluster_along_n);
        starts[j + 1] = padded += (m + GMM_GROUP_ROWS - 1) / GMM_GROUP_ROWS * GMM_GROUP_ROWS;
    }
    {
        const int32_t lane_work = work, lane_padded = padded;
#pragma unroll
        for (i = 1; i < 32; i *= 2) {
            const int32_t work_before = __shfl_up_sync(0xFFFFFFFFu, work, (unsigned)i);
            const int32_t padded_before = __shfl_up_sync(0xFFFFFFFFu, padded, (unsigned)i);
            if (lane >= i) work += work_before, padded += padded_before;
        }
        work -= lane_work;
        padded -= lane_padded;
    }
#pragma unroll 1
    for (j = first; j < last; j++) {
        work_ends[j + 1] += work;
        starts[j + 1] += padded;
    }
    __syncwarp();
    return tiles_n;
}

/* The predicted first tile of this CTA. Its operands are not multicast, since the CTAs of a cluster may have read
   different splits. Whole warp. */
GMM__DEVICE void gmm_fp8_predict_first_tile(const gmm_fp8_args *args, const gmm_sm90_scheduler *s,
                                            const gmm_sm90_cta cta, gmm_fp8_tile *f) {
    const int32_t *const ends = s->ends, *const work_ends = s->work_ends;
    const int32_t work = (int32_t)blockIdx.x / cta.cluster_size;
    int32_t g = 0, m;
    gmm_fp8_empty_tile(args, f);
    if (work >= work_ends[args->p.groups]) return;
    gmm_find_group32(work_ends, args->p.groups, work, &g);
    f->t.g = g;
    f->padded_row = s->padded_starts[g];
    m = ends[g + 1] - ends[g];
    if (m <= s->block_rows * s->max_blocks) { /* gmm_sm90_schedule_tile for one tile of rows */
        const int32_t tn = cta.cluster_size * (work - work_ends[g]) + cta.cta_rank;
        const int32_t units = (args->p.n + s->col_align - 1) / s->col_align;
        if (tn >= s->tiles_n) { /* only the other CTA of the cluster has a tile */
            gmm_fp8_empty_tile(args, f);
            return;
        }
        f->t.row = ends[g];
        f->t.end = ends[g + 1];
        f->t.rows = m;
        f->t.row_blocks = (m + s->block_rows - 1) / s->block_rows;
        f->t.n0 = s->col_align * gmm_sm90_even_begin(units, s->tiles_n, tn);
        f->t.cols = s->col_align * gmm_sm90_even_begin(units, s->tiles_n, tn + 1) - f->t.n0;
        if (f->t.cols > args->p.n - f->t.n0) f->t.cols = args->p.n - f->t.n0;
    } else {
        gmm_sm90_schedule_tile(s, s->cluster_along_n, 0, work - work_ends[g], 0, cta, &f->t);
        f->t.multicast = GMM_SM90_MULTICAST_NONE;
    }
}
/* Whether the predicted first tile is the true one, or both are empty. */
GMM__DEVICE int gmm_fp8_same_tile(const gmm_fp8_tile *f, const gmm_fp8_tile *predicted) {
    const gmm_sm90_tile *const a = &f->t, *const b = &predicted->t;
    return (a->cols <= 0 && b->cols <= 0) ||
           (a->g == b->g && a->row == b->row && a->end == b->end && a->m0 == b->m0 && a->rows == b->rows &&
            a->n0 == b->n0 && a->cols == b->cols && f->padded_row == predicted->padded_row);
}
/* Sends the other CTA of the cluster whether this CTA mispredicted. prediction: address of the gmm_fp8_prediction. One
   lane. */
GMM__DEVICE void gmm_fp8_send_mispredict(uint32_t prediction, int mispredicted) {
    const uint32_t word = prediction + GMM__OFFSET(gmm_fp8_prediction, peer_mispredicted);
    const uint32_t bar = prediction + GMM__OFFSET(gmm_fp8_prediction, peer_full);
    gmm_mbarrier_arrive_expect_tx(bar, 4);
    gmm_st_async_remote(word, bar, gmm_cluster_ctarank() ^ (gmm_cluster_nctarank() - 1), mispredicted);
}

