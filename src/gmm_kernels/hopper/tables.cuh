/* ................................................................................... Grouped products on Hopper ... */

/* The grouped products of common/epilogue.cuh, computed by wgmma (sm_90a). alpha2 multiplies the sum after alpha.

   swap_ab. A tile of D is computed transposed: the A operand of wgmma is B (the weights, M = 64 columns of D per
   instruction), and its B operand is A (the tokens, N = rows of D). The columns of D are multiples of 64 in nearly
   every layer, while the rows of groups vary. N comes in steps of 8 or 16, so a group is cut into tiles of nearly equal
   height, each with at most 15 rows of padding. Tile names are M x N of D: rows x columns.

   Warp roles of a CTA (384 threads; 512 in tiles with `gather`), and registers per thread after setmaxnreg (two CTAs
   per multiprocessor: in brackets). Warps 0 to 7 are two consumer warp groups with 232 [96]; the others have 40 [48].
   In wgrad, whose scheduler warp needs more, 224 and 56; with `gather`, where there is one more warp group, 216 and 40.
       consumers          cooperative tiles (`consumers` 2): each warp group has half of the tile's columns.
                          ping-pong tiles (`consumers` 1): the warp groups alternate between tiles, so that one stores
                          while the other multiplies; a warp group begins when the other's last stage is full
                          (last_stage_full), so that operands are read in the order in which they are loaded.
       producer, warp 8   loads every stage by TMA: one thread of the warp.
       scheduler          warp 9 (packed weights: warp 11): chooses work tiles and writes them to the tile ring.
       check, warp 10     compares the split with the early plan (below), then is a store warp in wgrad.
       scale loader       packed weights, warp 9: copies the scales of every stage.
       gather             tiles with `gather`, warps 12 to 15: load A, whose rows they gather (gather.cuh).
       store              wgrad, warps 10 and 11: move D between memory and store slots by TMA, in parts of 64 rows x
                          256 bytes. Four slots serve both warp groups in the order of tiles, which leaves shared memory
                          to stages.

   Pipeline. An arrow is a barrier, which its left side completes and its right side waits for:
       scheduler  --tile_full[16]-->  producer, consumers, store, gather, scale loader  --batch_empty[4]-->  scheduler
       producer   --full[stage]-->    consumers  --empty[stage]-->  producer (of both CTAs if an operand is multicast)
       scale loader  --full[stage]--> consumers  --empty[stage]-->  scale loader (packed weights)
       gather     --full[stage]-->    consumers  --empty[stage]-->  gather (gathered rows)
       store      --slot.empty[4]-->  consumers  --slot.full[4]-->  store (wgrad)
       consumers  --last_stage_full[i]-->  the other consumers (ping-pong)
       scheduler  --first_tile_planned-->  producer, check
       check      --split_checked-->  scheduler; where the early plan holds, check completes tile_full[0]

   mbarriers (barriers.cuh). `n` is what the wait is for: stage number n of all tiles, S stages; tile number n; part n
   of D. A wait names the parity of the phase that it waits for; a first wait for "empty" passes at once, as it names
   the phase before the first.
       barrier         completed by, arrivals per phase                            waited for by      parity of wait
       full[n % S]     the producer (1, and the bytes of the TMA boxes);           consumers          n / S
                       packed weights also the 32 lanes of the scale loader (33);
                       gathered rows the 128 lanes of the gather warps (129)
       empty[n % S]    consumer warps that multiply the tile, of all CTAs of the   producer, gather,  n / S + 1
                       cluster (4 consumers x cluster size)                        scale loader
       tile_full[n % 16]  the scheduler lane that wrote tile n; tile 0 of an early readers of the     n / 16
                       plan: lane 0 of check (1)                                   ring
       first_tile_planned  lane 0 of the scheduler: the early plan is complete (1) producer, check    0
       split_checked   lane 0 of check, behind planned_late (1)                    scheduler          0
       batch_empty[n / 4 % 4]  one thread of every reader of the ring (8 consumer  scheduler          n / 16 + 1
                       warps, producer; wgrad: 2 store warps; packed: scale loader;
                       gathered rows: 4 gather warps)
       last_stage_full[i]  warps of consumer warp group i, when the last stage     the other group    n / 2, n: number
                       of its tile is full (4)                                                        of its last tile
       slot[n % 4].empty  the two lanes of a store warp, with old D where beta     consumers          n / 4
                       is not 0 (2)
       slot[n % 4].full   warps of the warp group that wrote part n (4)            store warp         n / 4
   Named barriers (GMM_BAR_*): CONSUMER + i joins warp group i; ORDER + i, the order barrier of warp group i, holds the
   stores of wgrad in the order of tiles.

   Shared memory (shared.cuh), in KiB: stages of B, A and scales; store slots; then barriers, tile ring and tables.
       tile                stages              slots       tile            stages              slots
       160x256 (gather too) 4 x (32 + 20)      4 x 4       mx8_192x128     6 x (8 + 24 + 1)    4 x 4
       256x128 (short too) 4 x (16 + 32)       4 x 8       mx4, nv4 192x128  7 x (4 + 24 + 1)  4 x 4
       176x128             5 x (16 + 22)       4 x 8       mx8_48x128      6 x (8 + 6 + 1)     4 x 4
       192x128             4 x (16 + 24)       4 x 16      mx4, nv4 64x128  7 x (4 + 8 + 1)    4 x 4
       128x128             5 x (16 + 16)       4 x 16

   A cluster of two CTAs takes two tiles at once: two row tiles of the same columns share B, or two column tiles of the
   same rows share A; the shared operand is multicast, but for gathered rows. A CTA exits when all its stages are empty:
   the other CTA of the cluster has then arrived at its barriers for the last time.

   Deferred store (256x128): the accumulators of a finished tile are packed to 16 bits and stay in registers; a few rows
   are stored in every stage of the next tile, which hides the store without a slot for a whole tile: 32 rows, so that
   256 rows need 8 stages; short_256x128 stores 64 and is for contractions of fewer stages. The last tile of a CTA,
   which no stage follows, is stored at once, through the memory of the stages (gmm_sm90_store_last_).

   Small-M mode: where groups are so small that the loads of weights bound forward, the producer requests two
   stages at a time (GMM__SMALL_M).

   A kernel with two tiles uses the one whose price for the split is lower (gmm_sm90_choose_tile, in the scheduler
   warp).

   Early plan. The scheduler reads the split before griddepcontrol.wait and plans the first tile by it, and the producer
   determines what it will load. Meanwhile check reads the split again, after the wait. If it is equal, check publishes
   the first tile; else the scheduler plans anew (planned_late). Where the plan would need more than the split, or write
   device memory, it is made after the wait (gmm_sm90_plans_early).

   Ragged maps address token matrices whose rows are s bytes apart: dimensions {features, 2^30, ends, wraps}, strides
   {s, s, 2^34 - s} bytes. The coordinates (2^30 - rows + r, end, 2^30) are 2^64 + (end - rows + r) s bytes from the
   base, which wraps around to row end - rows + r. Rows r >= rows lie outside the map, and TMA delivers zeros for them.
   This is the arithmetic of Triton's ragged tensor descriptors.

   glu products. A warp group multiplies boxes of 64 gate columns by boxes of the 64 linear columns that belong to them,
   wherever both lie in B (gmm_sm90_glu_column), so that the activation's two operands are in one row of a store slot.

   The last two dimensions of maps of weights, and of D in wgrad, address memory in steps of 16 and 2^18 bytes, counted
   from GMM_SM90_MAP_BASE, so that one map serves matrices at any address (gmm_sm90_map_offset). */

/* The gated activation of a glu product: h = p act(D), where D, the pre-activation, has been rounded. */
typedef struct gmm_sm90_glu {
    gmm_kmat h;         /* [T, ffn] */
    const float *prob;  /* [T] p; NULL: 1 */
    gmm_act_kind kind;
    gmm_act_coef coef;
    int32_t block;      /* the columns of D, which are rows of B, are blocks of as many gate columns and linear columns:
                           8, 16, 32 or a multiple of 64; halves: ffn. D has 2 ffn columns, ffn a multiple of 64 */
    int32_t drops_d;    /* D is not stored */
} gmm_sm90_glu;

/* The gradient of the gated activation behind a dglu product, from D, the rounded gradient of its result, and from its
   inputs z: dz = p D f'(z), and h = p f(z) again. Rows of z, dz and h begin at multiples of 16 bytes. */
typedef struct gmm_sm90_dglu {
    gmm_kmat z, dz;     /* [T, 2 ffn]; the same matrix, or apart from one another; dz.data NULL: not wanted */
    gmm_kmat h;         /* [T, ffn]; data NULL: not wanted */
    const float *prob;  /* [T] p; NULL: 1 */
    float *dots;        /* [parts of GMM_ACT_DOT_COLS columns][T]: sums of D f(z) over a part, which add up to dprob;
                           NULL: not wanted */
    gmm_act_kind kind;
    gmm_act_coef coef;
    int32_t interleave; /* columns of z: 0: halves; else blocks of as many gate and linear columns, a multiple of 8 */
    int32_t linear;     /* columns from a gate column to its linear column */
    int64_t capacity;   /* T */
} gmm_sm90_dglu;

/* Which tile a kernel with two tiles computes, a column of GMM_SM90_KERNEL_LIST and of the FP8 lists. Its first tile is
   that of its row in kernels.cuh or fp8_kernels.cuh, which also names the second one. The device takes a choice other
   than by_split as the answer to whether the tile is the second. Kernels with one tile have `first`. */
typedef enum gmm_sm90_tile_choice {
    gmm_sm90_tile_first = 0,
    gmm_sm90_tile_second = 1,
    gmm_sm90_tile_by_split = 2 /* the scheduler chooses the one that is cheaper for the split */
} gmm_sm90_tile_choice;

typedef struct gmm_sm90_args {
    CUtensorMap a, a16, b;    /* boxes: A 64 rows, A 16 rows (not in wgrad), B 64 rows */
    CUtensorMap d;            /* boxes of D: of a deferred store, or in wgrad 64 rows */
    gmm_gemm_args p;          /* its offsets and tiles are not read */
    gmm_groups groups;        /* splits in device memory */
    int32_t *tables;          /* group tables in the workspace, where shared memory has too few entries, else NULL:
                                 gmm_sm90_table_bytes per CTA */
    int32_t d_by_tma;         /* whether TMA makes deferred stores (gmm_sm90_tma_stores); else only wgrad encodes `d` */
    int32_t tile_choice;      /* gmm_sm90_tile_choice */
    gmm_mat codes;            /* packed weights that the kernel dequantizes; tables in device memory */
    gmm_direction along;      /* direction of the packed copies: their lines run along the contraction */
    int32_t rows, cols;       /* of each packed weight matrix */
    gmm_row_index index;      /* tiles with `gather`: of the rows of A */
    const float *alpha2;      /* [G], beside p.alpha: a factor that is applied after p.alpha; NULL: 1 */
    gmm_sm90_glu glu;         /* glu products */
    gmm_sm90_dglu dglu;       /* dglu products */
} gmm_sm90_args;

#define GMM__SM90(name, tag) GMM__CAT(gmm_sm90_##name##_, tag) /* a constant of a format or of a tile */

/* Formats of B: 16-bit elements, or packed codes with scales: X(tag, bytes of 64 columns per stage, elements per
   scale). Packed codes are dequantized into registers, from which wgmma takes them (RS). GMM__SM90_PACKED_<tag>:
   whether a stage holds scales. */
#define GMM_SM90_B_FORMAT_LIST(X) \
    X(plain, 8192, 1) \
    X(mx8, 4096, 32) \
    X(mx4, 2048, 32) \
    X(nv4, 2048, 16)
#define GMM__SM90_PACKED_plain 0
#define GMM__SM90_PACKED_mx8 1
#define GMM__SM90_PACKED_mx4 1
#define GMM__SM90_PACKED_nv4 1
#define GMM__X(tag, bytes, width) GMM__SM90(b_format, tag),
enum { GMM_SM90_B_FORMAT_LIST(GMM__X) gmm_sm90_b_formats };
#undef GMM__X
#define GMM__X(tag, bytes, width) \
    GMM__SM90(b_bytes, tag) = bytes, GMM__SM90(scale_width, tag) = width, \
    GMM__SM90(box_width, tag) = (width) > 1 ? (bytes) / 64 : 64, /* elements of the tensor map in a line of a box */
enum { GMM_SM90_B_FORMAT_LIST(GMM__X) gmm_sm90_b_formats_end };
#undef GMM__X

/* Tiles, named rows x columns of D: X(tag,
       consumers      warp groups that share a tile: 2 cooperative, 1 ping-pong
       wgmma_m        blocks of 64 columns per warp group
       m16            most blocks of 16 rows
       stages         of 64 elements along the contraction
       store_blocks   blocks of 16 rows x 64 columns of 16 bits in a store slot
       b_format       format of B
       ctas           CTAs per multiprocessor
       deferred       blocks of 16 rows that a deferred store writes per stage of the next tile; 0: there is none
       gather         whether gather warps load A, whose rows they gather; else TMA does) */
#define GMM_SM90_TILE_LIST(X) \
    X(160x256, 2, 2, 10, 4, 2, plain, 1, 0, 0) \
    X(256x128, 2, 1, 16, 4, 4, plain, 1, 2, 0) \
    X(176x128, 1, 2, 11, 5, 4, plain, 1, 0, 0) \
    X(192x128, 1, 2, 12, 4, 8, plain, 1, 0, 0) \
    X(128x128, 1, 2, 8, 5, 8, plain, 1, 0, 0) \
    X(mx8_192x128, 2, 1, 12, 6, 2, mx8, 1, 0, 0) \
    X(mx4_192x128, 2, 1, 12, 7, 2, mx4, 1, 0, 0) \
    X(nv4_192x128, 2, 1, 12, 7, 2, nv4, 1, 0, 0) \
    X(mx8_48x128, 2, 1, 3, 6, 2, mx8, 2, 0, 0) \
    X(mx4_64x128, 2, 1, 4, 7, 2, mx4, 2, 0, 0) \
    X(nv4_64x128, 2, 1, 4, 7, 2, nv4, 2, 0, 0) \
    X(gather_160x256, 2, 2, 10, 4, 2, plain, 1, 0, 1) \
    X(short_256x128, 2, 1, 16, 4, 4, plain, 1, 4, 0)

/* Instances: X(op, dtype, precision, tile, tile choice, kernel). A kernel with two tiles stands in three rows, one per
   gmm_sm90_tile_choice; by_split follows the other two, with the columns of the first tile. gmm_options.tile numbers
   the rows of an operation and dtype in this order, and of tiles of nearly equal price the upper row wins. kernels.cuh
   has a row for each kernel.

   Names of GEMM kernels, as profilers show them: gmm_gemm_<op>_<operands>_<M>x<N>x<K>_<variant>_<arch>, without <op>
   where one kernel serves several operations. M x N is the tile of D, and K the elements of a stage along the
   contraction; in the name of a kernel with two tiles 160x256 stands first, although its first tile is 256x128, that of
   its row in kernels.cuh. <arch> is sm90, or mma for kernels of the portable engine. Every name stands in full in the
   source. */
#define GMM_SM90_KERNEL_LIST(X) \
    X(fwd, GMM_BF16, bf16, 160x256, second, gmm_gemm_fwd_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 160x256, second, gmm_gemm_fwd_f16_160x256x64_256x128x64_sm90)) \
    X(fwd, GMM_BF16, bf16, 256x128, first, gmm_gemm_fwd_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 256x128, first, gmm_gemm_fwd_f16_160x256x64_256x128x64_sm90)) \
    X(fwd, GMM_BF16, bf16, 176x128, first, gmm_gemm_fwd_bf16_176x128x64_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 176x128, first, gmm_gemm_fwd_f16_176x128x64_sm90)) \
    X(dgrad, GMM_BF16, bf16, 160x256, second, gmm_gemm_dgrad_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 160x256, second, gmm_gemm_dgrad_f16_160x256x64_256x128x64_sm90)) \
    X(dgrad, GMM_BF16, bf16, 256x128, first, gmm_gemm_dgrad_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 256x128, first, gmm_gemm_dgrad_f16_160x256x64_256x128x64_sm90)) \
    X(dgrad, GMM_BF16, bf16, 176x128, first, gmm_gemm_dgrad_bf16_176x128x64_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 176x128, first, gmm_gemm_dgrad_f16_176x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, mx8_192x128, first, gmm_gemm_fwd_bf16_mxfp8_192x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, mx4_192x128, first, gmm_gemm_fwd_bf16_mxfp4_192x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, nv4_192x128, first, gmm_gemm_fwd_bf16_nvfp4_192x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, mx8_48x128, first, gmm_gemm_fwd_bf16_mxfp8_48x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, mx4_64x128, first, gmm_gemm_fwd_bf16_mxfp4_64x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, nv4_64x128, first, gmm_gemm_fwd_bf16_nvfp4_64x128x64_sm90)) \
    X(wgrad, GMM_BF16, bf16, 192x128, first, gmm_gemm_wgrad_bf16_192x128x64_sm90) \
    GMM__IF_F16(X(wgrad, GMM_F16, f16, 192x128, first, gmm_gemm_wgrad_f16_192x128x64_sm90)) \
    X(wgrad, GMM_BF16, bf16, 128x128, first, gmm_gemm_wgrad_bf16_128x128x64_sm90) \
    GMM__IF_F16(X(wgrad, GMM_F16, f16, 128x128, first, gmm_gemm_wgrad_f16_128x128x64_sm90)) \
    X(fwd, GMM_BF16, bf16, 256x128, by_split, gmm_gemm_fwd_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 256x128, by_split, gmm_gemm_fwd_f16_160x256x64_256x128x64_sm90)) \
    X(dgrad, GMM_BF16, bf16, 256x128, by_split, gmm_gemm_dgrad_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 256x128, by_split, gmm_gemm_dgrad_f16_160x256x64_256x128x64_sm90)) \
    X(glu, GMM_BF16, bf16, 176x128, first, gmm_gemm_glu_bf16_176x128x64_sm90) \
    GMM__IF_F16(X(glu, GMM_F16, f16, 176x128, first, gmm_gemm_glu_f16_176x128x64_sm90)) \
    X(dglu, GMM_BF16, bf16, 176x128, first, gmm_gemm_dglu_bf16_176x128x64_sm90) \
    GMM__IF_F16(X(dglu, GMM_F16, f16, 176x128, first, gmm_gemm_dglu_f16_176x128x64_sm90)) \
    X(fwd, GMM_BF16, bf16, gather_160x256, first, gmm_gemm_fwd_bf16_160x256x64_gather_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, gather_160x256, first, gmm_gemm_fwd_f16_160x256x64_gather_sm90)) \
    X(dgrad, GMM_BF16, bf16, gather_160x256, first, gmm_gemm_dgrad_bf16_160x256x64_gather_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, gather_160x256, first, gmm_gemm_dgrad_f16_160x256x64_gather_sm90)) \
    X(fwd, GMM_BF16, bf16, short_256x128, first, gmm_gemm_fwd_bf16_256x128x64_short_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, short_256x128, first, gmm_gemm_fwd_f16_256x128x64_short_sm90)) \
    X(dgrad, GMM_BF16, bf16, short_256x128, first, gmm_gemm_dgrad_bf16_256x128x64_short_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, short_256x128, first, gmm_gemm_dgrad_f16_256x128x64_short_sm90))

/* A constant for each row of the list. Assertions in body_product_kernel.cuh name it, so that a row of kernels.cuh
   whose operation, dtype or tile is not that of the list does not compile. */
#define GMM__SM90_ROW_(kernel, op, tag, tile, choice) kernel##_##op##_##tag##_##tile##_##choice
#define GMM__SM90_ROW(kernel, op, tag, tile, choice) GMM__SM90_ROW_(kernel, op, tag, tile, choice)
#define GMM__X(op, dtype, tag, tile, choice, kernel) GMM__SM90_ROW_(kernel, op, tag, tile, choice),
enum { GMM_SM90_KERNEL_LIST(GMM__X) gmm_sm90_rows_end };
#undef GMM__X

/* Whether an operation has the epilogue of glu or of dglu, for the preprocessor. */
#define GMM__IS_GLU_fwd 0
#define GMM__IS_GLU_dgrad 0
#define GMM__IS_GLU_wgrad 0
#define GMM__IS_GLU_glu 1
#define GMM__IS_GLU_dglu 0
#define GMM__IS_DGLU_fwd 0
#define GMM__IS_DGLU_dgrad 0
#define GMM__IS_DGLU_wgrad 0
#define GMM__IS_DGLU_glu 0
#define GMM__IS_DGLU_dglu 1
/* Column of D, and row of B, that stands in column `c` of the tiles of a glu product: in these, 64 gate columns and the
   64 linear columns that belong to them alternate. Smaller blocks stay where they are. */
GMM__HD int32_t gmm_sm90_glu_column(int32_t block, int32_t c) {
    const int32_t gate = c / 128 * 64;
    return block < 64 ? c : gate + gate / block * block + c / 64 % 2 * block + c % 64;
}

/* Warp roles of a CTA, by the index of the warp. The two consumer warp groups come first; setmaxnreg takes whole warp
   groups, so that the roles of warps 8 to 11 have one budget of registers, and gather warps the same. */
enum {
    GMM_SM90_CONSUMER_WARPS = 8,
    GMM_SM90_PRODUCER_WARP = GMM_SM90_CONSUMER_WARPS,
    GMM_SM90_SCHEDULER_WARP = 9,         /* of plain operands */
    GMM_SM90_SCALE_WARP = 9,             /* packed weights: the scale loader */
    GMM_SM90_CHECK_WARP = 10,            /* checks the split, then becomes a store warp in wgrad */
    GMM_SM90_STORE_WARP = 10,            /* wgrad: the first of two store warps */
    GMM_SM90_PACKED_SCHEDULER_WARP = 11, /* packed weights */
    GMM_SM90_WARPS = 12,                 /* without gather warps */
    GMM_SM90_GATHER_WARP = GMM_SM90_WARPS, /* tiles with `gather`: the first of a further warp group */
    GMM_SM90_GATHER_WARPS = 4
};

/* The tile ring holds 16 work tiles; the scheduler writes 4 at a time, and its readers release 4 at a time. */
enum {
    GMM_SM90_RAGGED_ROWS = 1 << 30, /* rows of a ragged map; limits the capacity */
    GMM_SM90_MAP_BASE = 256,        /* address at which maps of matrices at any address begin */
    GMM_SM90_MAP_STEPS = 1 << 14,   /* steps of 16 bytes in their third dimension: 2^18 bytes, a step of the fourth */
    GMM_SM90_SMEM_GROUPS = 256,     /* most groups whose tables fit into shared memory */
    GMM_SM90_TABLE_LENGTH = GMM_SM90_SMEM_GROUPS + 1, /* entries of such a table */
    GMM_SM90_TILE_RING = 16,
    GMM_SM90_TILE_BATCH = 4,
    GMM_SM90_TILE_BATCHES = GMM_SM90_TILE_RING / GMM_SM90_TILE_BATCH,
    GMM_SM90_STORE_SLOTS = 4,
    GMM_SM90_BOX_BYTES = 64 * 128,  /* of a TMA box of 64 lines of 128 bytes */
    GMM_SM90_PART_BYTES = 64 * 256, /* of a part of D in wgrad: two boxes side by side, which fill a slot */
    GMM_SM90_SMALL_M = 128          /* most rows of a group in small-M mode */
};

/* Without sm_90a code the kernels are empty, and their launch bounds tell the host so (gmm_sm90_present). */
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GMM__SM90_BOUNDS __launch_bounds__(32)
#define GMM__FP8_BOUNDS __launch_bounds__(32)
#else
#define GMM__SM90_BOUNDS __launch_bounds__(GMM__CFG(threads), GMM__CFG(ctas_per_sm))
#define GMM__FP8_BOUNDS __launch_bounds__(GMM__CFG(threads), 1)
#endif

/* Constants of tiles: the columns of the list, and those that follow from them. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    GMM__SM90(consumers, tag) = consumers_, GMM__SM90(wgmma_m, tag) = wgmma_m_, GMM__SM90(m16, tag) = m16_, \
    GMM__SM90(stages, tag) = stages_, GMM__SM90(store_blocks, tag) = store_blocks_, \
    GMM__SM90(tile_n, tag) = (consumers_) * (wgmma_m_) * 64, \
    GMM__SM90(ctas_per_sm, tag) = ctas_, GMM__SM90(deferred, tag) = deferred_, GMM__SM90(gather, tag) = gather_, \
    GMM__SM90(b_format, tag) = GMM__SM90(b_format, b_format_), \
    GMM__SM90(box_width, tag) = GMM__SM90(box_width, b_format_), \
    GMM__SM90(scale_width, tag) = GMM__SM90(scale_width, b_format_),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_tiles_end };
#undef GMM__X
/* Warps of a CTA, and registers of its warp groups: two of consumers, one of the other roles, one of gather warps.
   Slots of 8 blocks are those of wgrad's tiles, as the rules of instances below assert, and wgrad's scheduler needs
   more registers. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    GMM__SM90(gather_warps, tag) = (gather_) ? GMM_SM90_GATHER_WARPS : 0, \
    GMM__SM90(threads, tag) = 32 * (GMM_SM90_WARPS + GMM__SM90(gather_warps, tag)), \
    GMM__SM90(consumer_regs, tag) = (ctas_) != 1 ? 96 : (gather_) ? 216 : (store_blocks_) == 8 ? 224 : 232, \
    GMM__SM90(other_regs, tag) = (ctas_) != 1 ? 48 : (store_blocks_) == 8 ? 56 : 40,
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_regs_end };
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(128 * (2 * GMM__SM90(consumer_regs, tag) + (1 + (gather_)) * GMM__SM90(other_regs, tag)) <= \
                      65536 / (ctas_) && \
                  GMM__SM90(consumer_regs, tag) % 8 == 0 && GMM__SM90(other_regs, tag) % 8 == 0, \
                  "tile " #tag ": a multiprocessor has 65536 registers, and setmaxnreg takes multiples of 8");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
/* Rules of tiles. Accumulators of a thread are wgmma_m x 8 x m16 of its consumer_regs registers. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert((m16_) <= 16 && (wgmma_m_) * 8 * (m16_) <= 192, \
                  "tile " #tag ": at most 16 blocks of 16 rows, and at most 192 accumulators per thread"); \
    static_assert((store_blocks_) % (wgmma_m_) == 0 && (store_blocks_) % 2 == 0, \
                  "tile " #tag ": a store slot holds whole blocks of a warp group, two at least");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(!GMM__SM90(b_format, b_format_) || ((consumers_) == 2 && (wgmma_m_) == 1 && (m16_) <= 12), \
                  "tile " #tag ": packed weights need two consumers of 64 columns each; wgmma RS has N up to 192");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(!(deferred_) || ((consumers_) == 2 && (wgmma_m_) == 1), \
                  "tile " #tag ": a deferred store needs two consumers with one block of 64 columns each"); \
    static_assert((m16_) % ((deferred_) ? (deferred_) : 1) == 0 && \
                  2 * (store_blocks_) % ((deferred_) ? (deferred_) : 1) == 0, \
                  "tile " #tag ": deferred divides m16 and the blocks of two store slots");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, dtype, tag, tile, tile_choice, kernel) \
    static_assert(!gmm_k_grouped_##op || (GMM__SM90(m16, tile) % 4 == 0 && GMM__SM90(store_blocks, tile) == 8 && \
                                          GMM__SM90(consumers, tile) == 1 && GMM__SM90(wgmma_m, tile) == 2), \
                  #kernel ": wgrad loads boxes of 64 rows of A, stores 64 rows x 256 bytes, and is ping-pong"); \
    static_assert(!gmm_ta_##op || !GMM__SM90(gather, tile), \
                  #kernel ": gather warps copy lines of A along the contraction, which are not rows of A in wgrad");
GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, dtype, tag, tile, tile_choice, kernel) \
    static_assert(gmm_k_grouped_##op || GMM__SM90(store_blocks, tile) != 8, \
                  #kernel ": store slots of 8 blocks select the registers of wgrad"); \
    static_assert(!GMM__SM90(b_format, tile) || (gmm_gemm_##op == gmm_gemm_fwd && (dtype) == GMM_BF16), \
                  #kernel ": packed weights are multiplied in forward and in bf16 alone");
GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, dtype, tag, tile, tile_choice, kernel) \
    static_assert(!(GMM__IS_GLU_##op || GMM__IS_DGLU_##op) || \
                  (GMM__SM90(wgmma_m, tile) == 2 && !GMM__SM90(deferred, tile) && \
                   (GMM__SM90(store_blocks, tile) == 2 || GMM__SM90(store_blocks, tile) == 4)), \
                  #kernel ": a warp group has rows of 128 columns in a slot, 16 or 32 rows at a time");
GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X
