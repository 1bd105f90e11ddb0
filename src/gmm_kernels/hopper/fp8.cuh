/* ............................................................................ Grouped FP8 products on Hopper ... */

/* Products of FP8 copies, whose lines run along the contraction: fwd x and w ROWWISE, dgrad dy ROWWISE and w
   COLUMNWISE, wgrad dy and x COLUMNWISE. Clusters and multicast are those of the 16-bit products (tables.cuh). The tile
   ring is too, except that its readers do not release its entries: the scheduler writes tile n when the producer has
   begun tile n - 8. A stage is 128 elements long. Without swap_ab: wgmma's A are D's rows (E4M3 or E5M2), its B are
   D's columns (E4M3); each consumer warp group has 64 rows of the tile and all of its columns.

   Warp roles: consumers (warp groups 0 to 1 or 2), then four warps with few registers: producer (one thread of it),
   scale loader, scheduler, store (GMM_FP8_*_WARP). The tile list has the registers of consumers and of the other warps.

   Pipeline. An arrow is a barrier, which its left side completes and its right side waits for:
       scheduler    --tile_full[16]-->  all others;  producer  --tile_begun[16]-->  scheduler
       producer, scale loader  --full[stage]-->  consumers  --empty[stage]-->  producer, scale loader (of both CTAs
                                                                               where an operand is multicast)
       store        --slot.empty[consumer]-->  consumer  --slot.full[consumer]-->  store
       scheduler    --prediction.full-->  producer, scale loader, consumers (the predicted first tile)
       scheduler of the other CTA  --prediction.peer_full-->  scheduler

   mbarriers. S: stages; n: stage number of all tiles, tile number, or part of D that the consumer stores.
       barrier             completed by, arrivals per phase                         waited for by        parity of wait
       full[n % S]         producer (1, and the bytes that TMA loads);              consumers            n / S
                           with scales also the scale loader: 1d2d its lanes
                           (33), 1d1d lane 0 (2)
       empty[n % S]        consumer warps of all CTAs of the cluster (4 consumers   producer,            n / S + 1
                           x cluster size; consumer 0 arrives for an idle one)      scale loader
       tile_full[n % 16]   scheduler lane 0 (1)                                     all other warps      n / 16
       tile_begun[n % 16]  producer, when it begins tile n (1). No reader           scheduler, for       n / 16
                           releases an entry: see "Rules of FP8 tiles"              tile n + 8
       slot[c].empty       store lanes of consumer c, a box each (store_boxes),     consumer c           n
                           with old D where it is loaded
       slot[c].full        threads of consumer c (128); of 16-bit D behind the      store lanes of c     n
                           first products of their next tile
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

   Two tiles. The 1d2d kernels for many tokens have the tiles 192x128 and 128x192, whose results have the same bits. The
   scheduler chooses one for the split, writes second_tile and initialises the barriers of slots before tile_full[0]
   completes, for which all other warps wait. In 128x192 the third consumer is idle: it gives registers to the other
   two, and at every empty barrier consumer 0 arrives twice, for itself and for it. Tables and barriers lie at the same
   places with either tile.

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
    int32_t tile_choice;      /* gmm_sm90_tile_choice */
} gmm_fp8_args;

enum { GMM_FP8_BLOCK_ROWS = 64 }; /* rows of a tile per consumer */
enum { GMM_FP8_MAX_CONSUMERS = 3 };
enum { GMM_FP8_IDLE_REGS = 24 }; /* registers of a consumer without rows */
/* Roles of the four warps behind those of the consumers. */
enum { GMM_FP8_PRODUCER_WARP, GMM_FP8_SCALE_WARP, GMM_FP8_SCHEDULER_WARP, GMM_FP8_STORE_WARP };
enum { GMM_FP8_SCALE_BLOCK_BYTES = 128 }; /* bytes of the scales of 8 columns of D in 1d1d, a line of 16 bytes each */

/* Tiles, rows x columns of D: X(tag, consumers, columns, stages, boxes of 64 rows x 128 bytes in a store slot,
   registers of consumers, registers of the other warps, whether fwd and dgrad predict the first tile of a CTA, whether
   operands may have a scale per line, whether it is a glu tile). Tags end in _small_m where the first tile is
   predicted, which is for few tokens: with many, 192x128 loses up to 4% by it. So is the glu tile, which loses with
   many tokens anyhow. This is not the small-M mode of the 16-bit products. The store slots of 128x128, the tile of
   1d1d, hold a whole fp32 tile. 128x192 leaves registers for an idle consumer. */
#define GMM_FP8_TILE_LIST(X) \
    X(192x128, 3, 128, 4, 2, 152, 56, 0, 1, 0) \
    X(192x128_small_m, 3, 128, 4, 2, 152, 56, 1, 1, 0) \
    X(128x192, 2, 192, 4, 3, 216, 56, 0, 1, 0) \
    X(128x192_small_m, 2, 192, 4, 3, 224, 56, 1, 1, 0) \
    X(128x128, 2, 128, 4, 4, 216, 72, 0, 0, 0) \
    X(192x128_glu, 3, 128, 4, 2, 152, 56, 1, 0, 1)

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

/* Instances: X(dtype of A, tag, scaling, tile, first tile of the kernel, tile choice, kernel). The includes in
   fp8_kernels.cuh follow the same list. A kernel serves fwd, dgrad and wgrad, so its name has no operation but glu. A
   kernel with two tiles has the threads and the shared memory of its first one. It stands in three rows, one per
   gmm_sm90_tile_choice: that of by_split in GMM_FP8_SPLIT_LIST, with the columns of the first tile. */
#define GMM_FP8_KERNEL_LIST(X) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128, 192x128, first, gmm_gemm_e4m3_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 192x128, 192x128, first, gmm_gemm_e5m2_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 128x192, 192x128, second, gmm_gemm_e4m3_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 128x192, 192x128, second, gmm_gemm_e5m2_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128_small_m, 192x128_small_m, first, gmm_gemm_e4m3_1d2d_192x128x128_small_m_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 192x128_small_m, 192x128_small_m, first, gmm_gemm_e5m2_1d2d_192x128x128_small_m_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 128x192_small_m, 128x192_small_m, first, gmm_gemm_e4m3_1d2d_128x192x128_small_m_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 128x192_small_m, 128x192_small_m, first, gmm_gemm_e5m2_1d2d_128x192x128_small_m_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128_glu, 192x128_glu, first, gmm_gemm_glu_e4m3_1d2d_192x128x128_sm90) \
    X(GMM_E4M3, e4m3, 1d1d, 128x128, 128x128, first, gmm_gemm_e4m3_1d1d_128x128x128_sm90) \
    X(GMM_E5M2, e5m2, 1d1d, 128x128, 128x128, first, gmm_gemm_e5m2_1d1d_128x128x128_sm90) \
    X(GMM_E4M3, e4m3, fast, 128x192, 128x192, first, gmm_gemm_e4m3_fast_128x192x128_sm90) \
    X(GMM_E5M2, e5m2, fast, 128x192, 128x192, first, gmm_gemm_e5m2_fast_128x192x128_sm90)
#define GMM_FP8_SPLIT_LIST(X) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128, 192x128, by_split, gmm_gemm_e4m3_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 192x128, 192x128, by_split, gmm_gemm_e5m2_1d2d_192x128x128_128x192x128_sm90)

#define GMM__FP8(name, tag) GMM__CAT(gmm_fp8_##name##_, tag) /* a constant or type of a tile or of a scaling */
#define GMM__FP8_INSTANCE(name, tag, scaling, tile) gmm_fp8_##name##_##tag##_##scaling##_##tile
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    GMM__FP8(consumers, tag) = consumers_, GMM__FP8(tile_n, tag) = tile_n_, GMM__FP8(stages, tag) = stages_, \
    GMM__FP8(store_boxes, tag) = boxes_, \
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
typedef struct alignas(16) gmm_fp8_tile {
    gmm_sm90_tile t;
    float outer_scale;     /* what all of its sums are multiplied by */
    int32_t d_flags;       /* how it is stored: GMM_FP8_D_*, and the second factor of outer_scale */
    int32_t padded_row;    /* where its group starts in padded copies */
    int32_t d_y, d_z, d_w; /* the last three TMA coordinates of its first row in D */
} gmm_fp8_tile;

/* Barriers besides those of stages and slots. */
typedef struct gmm_fp8_barriers {
    uint64_t tile_full[GMM_SM90_TILE_RING];  /* an entry of the tile ring has been written */
    uint64_t tile_begun[GMM_SM90_TILE_RING]; /* the producer has begun tile n: the scheduler may write tile n + 8 */
    int32_t second_tile; /* a kernel with two tiles computes the second; written before tile_full[0] completes */
    int32_t reserved;
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
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    typedef struct GMM__FP8(stage, tag) { \
        char b[(tile_n_) / 64][GMM_SM90_BOX_BYTES]; /* [64 columns] */ \
        char a[consumers_][GMM_SM90_BOX_BYTES];     /* [64 rows] */ \
    } GMM__FP8(stage, tag);
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
/* Scales per line, of a consumer's rows and of the tile's columns; 1 if absent. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    typedef struct GMM__FP8(line_scales, tag) { \
        float row[(lines_) ? GMM_FP8_BLOCK_ROWS : 4], col[(lines_) ? (tile_n_) : 4]; \
    } GMM__FP8(line_scales, tag);
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    typedef struct GMM__FP8(tile_smem, tag) { \
        GMM__FP8(stage, tag) stage[stages_]; char slot[consumers_][boxes_][GMM_SM90_BOX_BYTES]; \
        gmm_sm90_stage_barriers stage_bars[stages_]; gmm_fp8_barriers bars; \
        gmm_sm90_slot_barriers slot_bars[GMM_FP8_MAX_CONSUMERS]; GMM__IF(predicts_, gmm_fp8_prediction prediction;) \
        gmm_fp8_tile ring[GMM_SM90_TILE_RING]; \
        int32_t ends[GMM_SM90_TABLE_LENGTH], work_ends[GMM_SM90_TABLE_LENGTH], padded_starts[GMM_SM90_TABLE_LENGTH]; \
        alignas(16) GMM__FP8(line_scales, tag) line_scales[consumers_]; } GMM__FP8(tile_smem, tag);
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
/* Sizes and offsets in bytes; prediction_offset is 0 where a tile has none. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    GMM__FP8(a_offset, tag) = offsetof(GMM__FP8(stage, tag), a), \
    GMM__FP8(stage_bytes, tag) = sizeof(GMM__FP8(stage, tag)), \
    GMM__FP8(slot_bytes, tag) = (boxes_) * GMM_SM90_BOX_BYTES, \
    GMM__FP8(line_scale_bytes, tag) = sizeof(GMM__FP8(line_scales, tag)), \
    GMM__FP8(prediction_offset, tag) = GMM__IF(predicts_, offsetof(GMM__FP8(tile_smem, tag), prediction) +) 0,
enum { GMM_FP8_TILE_LIST(GMM__X) gmm_fp8_tile_smem_end };
#undef GMM__X
/* The scales of a stage: of rows, then of columns. With 1d2d two floats for columns, of those up to the next multiple
   of 128 and of those behind it, all 1 where A has no scales by blocks; with 1d1d an operand of wgmma
   (gmm_fp8_store_column_scale). */
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    typedef struct GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_) { \
        float row[GMM__FP8(consumers, tile_)][GMM_FP8_BLOCK_ROWS]; \
        char col[GMM__FP8(tile_scales, scaling) + GMM__FP8(column_scales, scaling) * GMM__FP8(tile_n, tile_)]; \
    } GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_);
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
/* unread: wgmma reads every line of column scales twice, which compute-sanitizer takes for one read of twice as many
   bytes; behind the last stage these are within the struct. */
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    typedef struct GMM__FP8_INSTANCE(smem, tag, scaling, tile_) { \
        GMM__FP8(tile_smem, tile_) tile; \
        GMM__IF(GMM__FP8_HAS_STAGE_SCALES_##scaling, \
                GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_) scales[GMM__FP8(stages, tile_)];) \
        GMM__IF(GMM__FP8_IS_1D1D_##scaling, char unread[GMM__FP8(column_scales, scaling) * GMM__FP8(tile_n, tile_)];) \
    } GMM__FP8_INSTANCE(smem, tag, scaling, tile_);
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    static_assert(sizeof(GMM__FP8_INSTANCE(smem, tag, scaling, tile_)) <= 232448, \
                  #kernel ": a CTA has at most 227 KiB of shared memory"); \
    static_assert(GMM__FP8_IS_FAST_##scaling || \
                      sizeof(GMM__FP8_INSTANCE(smem, tag, scaling, tile_)) >= \
                          sizeof(GMM__FP8(tile_smem, tile_)) + (int)GMM__FP8(stages, tile_) * \
                              sizeof(GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_)), \
                  #kernel ": the scales of stages follow the struct of the tile");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling_, tile_, first_, tile_choice, kernel) \
    static_assert(!GMM__FP8(glu, tile_) || (int)GMM__FP8(scaling, scaling_) == GMM_FP8_1D2D, \
                  #kernel ": a glu product is by blocks");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
/* Tiles of one kernel. Warps that do not know the choice yet find the barriers, the ring and the tables at the same
   places. The kernel has the threads and the shared memory of its first tile. */
#define GMM__SAME_OFFSET(first, second, member) \
    (offsetof(GMM__FP8(tile_smem, first), member) == offsetof(GMM__FP8(tile_smem, second), member))
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    static_assert(GMM__SAME_OFFSET(first_, tile_, slot) && GMM__SAME_OFFSET(first_, tile_, stage_bars) && \
                  GMM__SAME_OFFSET(first_, tile_, bars) && GMM__SAME_OFFSET(first_, tile_, slot_bars) && \
                  GMM__SAME_OFFSET(first_, tile_, ring) && GMM__SAME_OFFSET(first_, tile_, ends) && \
                  GMM__SAME_OFFSET(first_, tile_, line_scales), #kernel ": places of what its tiles have in common");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#undef GMM__SAME_OFFSET
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    static_assert(sizeof(GMM__FP8_INSTANCE(smem, tag, scaling, tile_)) <= \
                      sizeof(GMM__FP8_INSTANCE(smem, tag, scaling, first_)) && \
                  (int)GMM__FP8(stages, tile_) == (int)GMM__FP8(stages, first_) && \
                  (int)GMM__FP8(consumers, tile_) <= (int)GMM__FP8(consumers, first_), #kernel ": size of its tiles");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    static_assert((int)gmm_sm90_tile_##tile_choice == gmm_sm90_tile_first || \
                      128 * ((int)GMM__FP8(consumers, tile_) * (int)GMM__FP8(consumer_regs, tile_) + \
                             GMM_FP8_IDLE_REGS + (int)GMM__FP8(other_regs, first_)) <= 65536, \
                  #kernel ": registers of its second tile, beside an idle consumer"); \
    static_assert((int)gmm_sm90_tile_##tile_choice != gmm_sm90_tile_second || \
                      (int)GMM__FP8(consumers, tile_) + 1 == (int)GMM__FP8(consumers, first_), \
                  #kernel ": consumer 0 arrives for one idle consumer");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling_, tile_, first_, tile_choice, kernel) \
    static_assert((int)gmm_sm90_tile_##tile_choice == gmm_sm90_tile_first || \
                      ((int)GMM__FP8(scaling, scaling_) == GMM_FP8_1D2D && \
                       !GMM__FP8(predicts_first_tile, tile_) && !GMM__FP8(glu, tile_) && \
                       !GMM__FP8(predicts_first_tile, first_) && !GMM__FP8(glu, first_)), \
                  #kernel ": 1d2d tiles alone have a choice, and a predicted tile would precede it");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
/* What addresses and TMA assume of the layout. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert(GMM__FP8(stage_bytes, tag) % 1024 == 0 && GMM__FP8(a_offset, tag) % 1024 == 0 && \
                  offsetof(GMM__FP8(tile_smem, tag), slot) % 1024 == 0, \
                  "tile " #tag ": operands and slots begin at multiples of 1024 bytes, 8 lines of the swizzle");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert(offsetof(GMM__FP8(tile_smem, tag), padded_starts) - offsetof(GMM__FP8(tile_smem, tag), ends) == \
                      8 * GMM_SM90_TABLE_LENGTH, \
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
