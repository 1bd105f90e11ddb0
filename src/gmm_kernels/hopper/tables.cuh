/* ................................................................................... Grouped products on Hopper ... */

/* The same products by wgmma (sm_90a). A tile of D is computed transposed: D's columns take wgmma's m, which comes in
   blocks of 64 and is a multiple of 64 in nearly every layer; D's rows take n, which comes in steps of 16, so that a
   group with any number of rows is cut into tiles of nearly equal height with at most 15 rows too many.

   A cluster of two blocks takes two tiles at a time: two row tiles of the same columns, which share B, or two column
   tiles of the same rows, which share A; what is shared is read once and multicast. A block is a producer warp, which
   moves operands by TMA, and two groups of 128 threads, which multiply: either each has half of the tile's columns, or
   they take turns at tiles, so that one multiplies while the other takes its sums to D; it begins when the other's last
   stage has come. Each has its own rooms in shared memory; in wgrad they have four in common, by turns in the order of
   tiles, so that one has all of them while the other multiplies, and two warps move D between these and memory by TMA,
   part by part, so that most of shared memory is left to stages. Or a group keeps its sums in registers, packed
   to 16 bits, and sends a lot of them to D in each stage of its next tile: so the way out, which takes as long as three
   stages, is hidden without rooms for a tile. A warp of its own places tiles and tells them through a ring, the first
   one by what the split says before the launch before has ended, and anew if that changes; so the producer never waits
   for that, and runs as far ahead as the stages allow. Where groups are so small that forward waits for weights alone,
   it asks for two stages at a time (GMM__SMALL_M). A block leaves when all stages have been handed back, by its neighbour
   as well, of whom nothing is on its way then. Where a kernel has two tiles, who places them takes the one that the
   groups' sizes make cheaper, and tells it with the first.

   Token matrices are read through ragged maps: dimensions {features, 2^30, ends, wraps}, strides {s, s, 2^34 - s}
   bytes. The coordinates (2^30 - rows + r, end, 2^30) address row end - rows + r, by wraparound at 2^64, and lie
   outside from r = rows on, where hardware delivers zeros: the arithmetic of Triton's ragged tensor descriptors.
   Weights are read through maps whose last two dimensions address memory itself in steps of 16 and 2^18 bytes, so that
   one map serves weights wherever they stand. */
typedef struct gmm_sm90_args {
    CUtensorMap a, a16, b;    /* boxes: A 64 lines, A 16 rows (wgrad: D 64 rows), B 64 lines */
    CUtensorMap d;            /* boxes of what goes out at once beside products, if D's rows are at 16 bytes */
    gmm_gemm_args p;          /* offsets and tiles are not read */
    gmm_groups groups;        /* splits in device memory */
    int32_t *tables;          /* more groups than the kernel has room for: gmm_sm90_table_bytes per block */
    int32_t tile;             /* of a kernel with two tiles: 0 the first, 1 the second, 2 chosen by the split */
    gmm_mat codes;            /* weights as a copy, converted in the kernel: tables in device memory */
    gmm_direction along;      /* of its lines, which run along the contraction */
    int32_t rows, cols;       /* of each matrix that was quantized */
} gmm_sm90_args;

/* What B is: 16-bit elements, or codes with their scales: X(tag, bytes of 64 columns in a stage, bytes of its scales,
   elements per scale). Codes become elements in registers, from where wgmma takes them. */
#define GMM_SM90_B_FORMAT_LIST(X) \
    X(plain, 8192, 0, 1) \
    X(mx8, 4096, 1024, 32) \
    X(mx4, 2048, 1024, 32) \
    X(nv4, 2048, 1024, 16)
#define GMM__X(tag, bytes, scale_bytes, scale_width) GMM__CAT(gmm_sm90_b_format_, tag),
enum { GMM_SM90_B_FORMAT_LIST(GMM__X) gmm_sm90_b_formats };
#undef GMM__X
#define GMM__X(tag, bytes, scale_bytes, scale_width) GMM__CAT(gmm_sm90_b_bytes_, tag) = bytes, GMM__CAT(gmm_sm90_scales_, tag) = scale_bytes, \
    GMM__CAT(gmm_sm90_scale_width_, tag) = scale_width, GMM__CAT(gmm_sm90_box_, tag) = (scale_width) > 1 ? (bytes) / 64 : 64, /* map's elements */
enum { GMM_SM90_B_FORMAT_LIST(GMM__X) gmm_sm90_b_formats_end };
#undef GMM__X

/* Tiles: X(tag, groups of threads at one tile, blocks of 64 columns per group of threads, most units of 16 rows, stages
   of depth 64, units by 64 columns of 16-bit elements that go out at once, groups that fit, B, blocks per
   multiprocessor, units of 16-bit D that go out per stage of the next tile's products: 0 = it goes out before these).
   All blocks of a unit go out together. */
#define GMM_SM90_TILE_LIST(X) \
    X(160x256, 2, 2, 10, 4, 2, 256, plain, 1, 0) \
    X(256x128, 2, 1, 16, 4, 4, 256, plain, 1, 2) \
    X(176x128, 1, 2, 11, 5, 4, 256, plain, 1, 0) \
    X(192x128, 1, 2, 12, 4, 8, 256, plain, 1, 0) \
    X(128x128, 1, 2, 8, 5, 8, 256, plain, 1, 0) \
    X(mx8_192x128, 2, 1, 12, 6, 2, 256, mx8, 1, 0) \
    X(mx4_192x128, 2, 1, 12, 7, 2, 256, mx4, 1, 0) \
    X(nv4_192x128, 2, 1, 12, 7, 2, 256, nv4, 1, 0) \
    X(mx8_48x128, 2, 1, 3, 6, 2, 256, mx8, 2, 0) \
    X(mx4_64x128, 2, 1, 4, 7, 2, 256, mx4, 2, 0) \
    X(nv4_64x128, 2, 1, 4, 7, 2, 256, nv4, 2, 0)

/* Instances: X(op, dtype, precision, tile, kernel, which): a kernel of two tiles takes its first (0) or second (1), or
   that which the groups' sizes make cheaper (2). The includes below follow the same list. */
#define GMM_SM90_KERNEL_LIST(X) \
    X(fwd, GMM_BF16, bf16, 160x256, 160x256_256x128, 1) X(fwd, GMM_F16, f16, 160x256, 160x256_256x128, 1) \
    X(fwd, GMM_BF16, bf16, 256x128, 160x256_256x128, 0) X(fwd, GMM_F16, f16, 256x128, 160x256_256x128, 0) \
    X(fwd, GMM_BF16, bf16, 176x128, 176x128, 0) X(fwd, GMM_F16, f16, 176x128, 176x128, 0) \
    X(dgrad, GMM_BF16, bf16, 160x256, 160x256_256x128, 1) X(dgrad, GMM_F16, f16, 160x256, 160x256_256x128, 1) \
    X(dgrad, GMM_BF16, bf16, 256x128, 160x256_256x128, 0) X(dgrad, GMM_F16, f16, 256x128, 160x256_256x128, 0) \
    X(dgrad, GMM_BF16, bf16, 176x128, 176x128, 0) X(dgrad, GMM_F16, f16, 176x128, 176x128, 0) \
    X(fwd, GMM_BF16, bf16, mx8_192x128, mx8_192x128, 0) X(fwd, GMM_BF16, bf16, mx4_192x128, mx4_192x128, 0) \
    X(fwd, GMM_BF16, bf16, nv4_192x128, nv4_192x128, 0) X(fwd, GMM_BF16, bf16, mx8_48x128, mx8_48x128, 0) \
    X(fwd, GMM_BF16, bf16, mx4_64x128, mx4_64x128, 0) X(fwd, GMM_BF16, bf16, nv4_64x128, nv4_64x128, 0) \
    X(wgrad, GMM_BF16, bf16, 192x128, 192x128, 0) X(wgrad, GMM_F16, f16, 192x128, 192x128, 0) \
    X(wgrad, GMM_BF16, bf16, 128x128, 128x128, 0) X(wgrad, GMM_F16, f16, 128x128, 128x128, 0) \
    X(fwd, GMM_BF16, bf16, 256x128, 160x256_256x128, 2) X(fwd, GMM_F16, f16, 256x128, 160x256_256x128, 2) \
    X(dgrad, GMM_BF16, bf16, 256x128, 160x256_256x128, 2) X(dgrad, GMM_F16, f16, 256x128, 160x256_256x128, 2)

/* A ring of tiles holds a batch that is placed at once and batches before it, each until all who read it say so. */
enum { GMM_SM90_THREADS = 384, GMM_SM90_RAGGED_ROWS = 1 << 30, GMM_SM90_MAP_BASE = 256, GMM_SM90_TILE_RING = 16,
       GMM_SM90_TILE_BATCH = 4, GMM_SM90_TILE_BATCHES = GMM_SM90_TILE_RING / GMM_SM90_TILE_BATCH, GMM_SM90_SMALL_M = 128 };

/* Elsewhere than on sm_90a the kernels are empty, and known by this. */
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GMM__SM90_BOUNDS(blocks) __launch_bounds__(32)
#define GMM__FP8_BOUNDS __launch_bounds__(32)
#else
#define GMM__SM90_BOUNDS(blocks) __launch_bounds__(GMM_SM90_THREADS, blocks)
#define GMM__FP8_BOUNDS __launch_bounds__(GMM__CFG(threads), 1)
#endif

/* Shared memory: stages of B and A, rooms for D on its way (two per group of threads; wgrad: four, for whose turn it
   is), barriers, tiles and one that is none, which tile was taken and how, groups. */
#define GMM__X(tag, consumers, wgmma_m, m16, stages, store_blocks, smem_groups, b_format, ctas, deferred) \
    GMM__CAT(gmm_sm90_consumers_, tag) = consumers, GMM__CAT(gmm_sm90_wgmma_m_, tag) = wgmma_m, GMM__CAT(gmm_sm90_m16_, tag) = m16, \
    GMM__CAT(gmm_sm90_stages_, tag) = stages, GMM__CAT(gmm_sm90_store_blocks_, tag) = store_blocks, GMM__CAT(gmm_sm90_smem_groups_, tag) = smem_groups, \
    GMM__CAT(gmm_sm90_tile_n_, tag) = (consumers) * (wgmma_m) * 64, GMM__CAT(gmm_sm90_ctas_per_sm_, tag) = ctas, \
    GMM__CAT(gmm_sm90_deferred_, tag) = deferred,
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_tiles_end };
#undef GMM__X
#define GMM__X(tag, consumers, wgmma_m, m16, stages, store_blocks, smem_groups, b_format, ctas, deferred) \
    GMM__CAT(gmm_sm90_tile_b_, tag) = GMM__CAT(gmm_sm90_b_format_, b_format), GMM__CAT(gmm_sm90_box_, tag) = GMM__CAT(gmm_sm90_box_, b_format), \
    GMM__CAT(gmm_sm90_scale_width_, tag) = GMM__CAT(gmm_sm90_scale_width_, b_format), \
    GMM__CAT(gmm_sm90_b_stage_bytes_, tag) = (consumers) * (wgmma_m) * GMM__CAT(gmm_sm90_b_bytes_, b_format), \
    GMM__CAT(gmm_sm90_scales_, tag) = (consumers) * (wgmma_m) * GMM__CAT(gmm_sm90_b_bytes_, b_format) + (m16) * 2048,
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_operands_end };
#undef GMM__X
#define GMM__X(tag, consumers, wgmma_m, m16, stages, store_blocks, smem_groups, b_format, ctas, deferred) GMM__CAT(gmm_sm90_stage_bytes_, tag) = \
    GMM__CAT(gmm_sm90_scales_, tag) + GMM__CAT(gmm_sm90_scales_, b_format),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_stages_end };
#undef GMM__X
#define GMM__X(tag, consumers, wgmma_m, m16, stages, store_blocks, smem_groups, b_format, ctas, deferred) \
    GMM__CAT(gmm_sm90_slot_bytes_, tag) = (store_blocks) * 2048, GMM__CAT(gmm_sm90_slots_offset_, tag) = GMM__CAT(gmm_sm90_stage_bytes_, tag) * (stages), \
    GMM__CAT(gmm_sm90_barriers_offset_, tag) = GMM__CAT(gmm_sm90_stage_bytes_, tag) * (stages) + 4 * (store_blocks) * 2048, \
    GMM__CAT(gmm_sm90_ring_offset_, tag) = (GMM__CAT(gmm_sm90_stage_bytes_, tag) + 16) * (stages) + 4 * (store_blocks) * 2048 + \
    8 * (GMM_SM90_TILE_RING + GMM_SM90_TILE_BATCHES + 10),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_slots_end };
#undef GMM__X
#define GMM__X(tag, consumers, wgmma_m, m16, stages, store_blocks, smem_groups, b_format, ctas, deferred) GMM__CAT(gmm_sm90_smem_bytes_, tag) = \
    GMM__CAT(gmm_sm90_ring_offset_, tag) + (GMM_SM90_TILE_RING + 1) * 40 + 8 * ((smem_groups) + 2),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_smem_end };
#undef GMM__X
#define GMM__X(tag, consumers, wgmma_m, m16, stages, store_blocks, smem_groups, b_format, ctas, deferred) GMM__CAT(gmm_sm90_fits_, tag) = \
    1 / (GMM__CAT(gmm_sm90_smem_bytes_, tag) <= 233472 / (ctas) - 1024),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_fits_end };
#undef GMM__X
#define GMM__X(tag, consumers, wgmma_m, m16, stages, store_blocks, smem_groups, b_format, ctas, deferred) \
    + 1 / ((store_blocks) % (wgmma_m) == 0 && (store_blocks) % 2 == 0 && (!(deferred) || ((consumers) == 2 && (wgmma_m) == 1)) && \
           (m16) % ((deferred) ? (deferred) : 1) == 0 && 2 * (store_blocks) % ((deferred) ? (deferred) : 1) == 0)
enum { gmm_sm90_stores_fit = 0 GMM_SM90_TILE_LIST(GMM__X) };
#undef GMM__X
/* wgrad: a stage has room for whole boxes of A, a room for 64 rows by 256 bytes of D; groups of threads take turns */
#define GMM__X(op, dtype, tag, tile, kernel, which) \
    + 1 / (!gmm_ragged_k_##op || (GMM__CAT(gmm_sm90_m16_, tile) % 4 == 0 && GMM__CAT(gmm_sm90_store_blocks_, tile) == 8 && \
                                  GMM__CAT(gmm_sm90_consumers_, tile) == 1 && GMM__CAT(gmm_sm90_wgmma_m_, tile) == 2))
enum { gmm_sm90_boxes_fit = 0 GMM_SM90_KERNEL_LIST(GMM__X) };
#undef GMM__X
/* tiles of one kernel have barriers at the same place */
enum { gmm_sm90_pairs_fit = 1 / (gmm_sm90_barriers_offset_160x256 == gmm_sm90_barriers_offset_256x128 && gmm_sm90_ring_offset_160x256 == gmm_sm90_ring_offset_256x128) };

