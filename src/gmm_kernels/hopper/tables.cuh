/* ................................................................................... Grouped products on Hopper ... */

#include <cuda.h>
#include <cudaTypedefs.h>

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
   it asks for two stages at a time (GMM__LOW). A block leaves when all stages have been handed back, by its neighbour
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
    int32_t tile;             /* of a kernel of two: 0, 1 its first or second, 2 chosen from the sizes */
    gmm_mat codes;            /* weights as a copy, converted in the kernel: tables in device memory */
    gmm_direction along;      /* of its lines, which run along the contraction */
    int32_t rows, cols;       /* of each matrix that was quantized */
    const float *alpha2;      /* [G], with p.alpha: sums are multiplied by these afterwards; NULL = 1 */
} gmm_sm90_args;

/* What B is: 16-bit elements, or codes with their scales: X(tag, bytes of 64 columns in a stage, bytes of its scales,
   elements per scale). Codes become elements in registers, from where wgmma takes them. */
#define GMM_SM90_FACTOR_LIST(X) \
    X(plain, 8192, 0, 1) \
    X(mx8, 4096, 1024, 32) \
    X(mx4, 2048, 1024, 32) \
    X(nv4, 2048, 1024, 16)
#define GMM__X(tag, block, scales, width) GMM__CAT(gmm9_factor_, tag),
enum { GMM_SM90_FACTOR_LIST(GMM__X) gmm9_factors };
#undef GMM__X
#define GMM__X(tag, block, scales, width) GMM__CAT(gmm9_block_, tag) = block, GMM__CAT(gmm9_scales_, tag) = scales, \
    GMM__CAT(gmm9_width_, tag) = width, GMM__CAT(gmm9_box_, tag) = (width) > 1 ? (block) / 64 : 64, /* map's elements */
enum { GMM_SM90_FACTOR_LIST(GMM__X) gmm9_factors_end };
#undef GMM__X

/* Tiles: X(tag, groups of threads at one tile, blocks of 64 columns per group of threads, most units of 16 rows, stages
   of depth 64, units by 64 columns of 16-bit elements that go out at once, groups that fit, B, blocks per
   multiprocessor, units of 16-bit D that go out per stage of the next tile's products: 0 = it goes out before these).
   All blocks of a unit go out together. */
#define GMM_SM90_TILE_LIST(X) \
    X(256x160, 2, 2, 10, 4, 2, 256, plain, 1, 0) \
    X(128x256, 2, 1, 16, 4, 4, 256, plain, 1, 2) \
    X(128x176, 1, 2, 11, 5, 4, 256, plain, 1, 0) \
    X(128x192, 1, 2, 12, 4, 8, 256, plain, 1, 0) \
    X(128x128, 1, 2, 8, 5, 8, 256, plain, 1, 0) \
    X(mx8_128x192, 2, 1, 12, 6, 2, 256, mx8, 1, 0) \
    X(mx4_128x192, 2, 1, 12, 7, 2, 256, mx4, 1, 0) \
    X(nv4_128x192, 2, 1, 12, 7, 2, 256, nv4, 1, 0) \
    X(mx8_128x48, 2, 1, 3, 6, 2, 256, mx8, 2, 0) \
    X(mx4_128x64, 2, 1, 4, 7, 2, 256, mx4, 2, 0) \
    X(nv4_128x64, 2, 1, 4, 7, 2, 256, nv4, 2, 0)

/* Instances: X(op, dtype, precision, tile, kernel, which): a kernel of two tiles takes its first (0) or second (1), or
   that which the groups' sizes make cheaper (2). The includes below follow the same list. */
#define GMM_SM90_KERNEL_LIST(X) \
    X(fwd, GMM_BF16, bf16, 256x160, 256x160_128x256, 1) X(fwd, GMM_F16, f16, 256x160, 256x160_128x256, 1) \
    X(fwd, GMM_BF16, bf16, 128x256, 256x160_128x256, 0) X(fwd, GMM_F16, f16, 128x256, 256x160_128x256, 0) \
    X(fwd, GMM_BF16, bf16, 128x176, 128x176, 0) X(fwd, GMM_F16, f16, 128x176, 128x176, 0) \
    X(dgrad, GMM_BF16, bf16, 256x160, 256x160_128x256, 1) X(dgrad, GMM_F16, f16, 256x160, 256x160_128x256, 1) \
    X(dgrad, GMM_BF16, bf16, 128x256, 256x160_128x256, 0) X(dgrad, GMM_F16, f16, 128x256, 256x160_128x256, 0) \
    X(dgrad, GMM_BF16, bf16, 128x176, 128x176, 0) X(dgrad, GMM_F16, f16, 128x176, 128x176, 0) \
    X(fwd, GMM_BF16, bf16, mx8_128x192, mx8_128x192, 0) X(fwd, GMM_BF16, bf16, mx4_128x192, mx4_128x192, 0) \
    X(fwd, GMM_BF16, bf16, nv4_128x192, nv4_128x192, 0) X(fwd, GMM_BF16, bf16, mx8_128x48, mx8_128x48, 0) \
    X(fwd, GMM_BF16, bf16, mx4_128x64, mx4_128x64, 0) X(fwd, GMM_BF16, bf16, nv4_128x64, nv4_128x64, 0) \
    X(wgrad, GMM_BF16, bf16, 128x192, 128x192, 0) X(wgrad, GMM_F16, f16, 128x192, 128x192, 0) \
    X(wgrad, GMM_BF16, bf16, 128x128, 128x128, 0) X(wgrad, GMM_F16, f16, 128x128, 128x128, 0) \
    X(fwd, GMM_BF16, bf16, 128x256, 256x160_128x256, 2) X(fwd, GMM_F16, f16, 128x256, 256x160_128x256, 2) \
    X(dgrad, GMM_BF16, bf16, 128x256, 256x160_128x256, 2) X(dgrad, GMM_F16, f16, 128x256, 256x160_128x256, 2)

/* A ring of tiles holds a batch that is placed at once and batches before it, each until all who read it say so. */
enum { GMM_SM90_THREADS = 384, GMM_SM90_RAGGED = 1 << 30, GMM_SM90_BASE = 256, GMM_SM90_RING = 16,
       GMM_SM90_BATCH = 4, GMM_SM90_BATCHES = GMM_SM90_RING / GMM_SM90_BATCH, GMM_SM90_LOW = 128 };

/* Elsewhere than on sm_90a the kernels are empty, and known by this. */
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GMM__SM90_BOUNDS(blocks) __launch_bounds__(32)
#define GMM__FP8_BOUNDS __launch_bounds__(32)
#else
#define GMM__SM90_BOUNDS(blocks) __launch_bounds__(GMM_SM90_THREADS, blocks)
#define GMM__FP8_BOUNDS __launch_bounds__(GMM__OF(threads), 1)
#endif

/* Shared memory: stages of B and A, rooms for D on its way (two per group of threads; wgrad: four, for whose turn it
   is), barriers, tiles and one that is none, which tile was taken and how, groups. */
#define GMM__X(tag, teams, mb, units, st, out, groups, factor, blocks, later) \
    GMM__CAT(gmm9_teams_, tag) = teams, GMM__CAT(gmm9_mb_, tag) = mb, GMM__CAT(gmm9_units_, tag) = units, \
    GMM__CAT(gmm9_stages_, tag) = st, GMM__CAT(gmm9_out_, tag) = out, GMM__CAT(gmm9_groups_, tag) = groups, \
    GMM__CAT(gmm9_cols_, tag) = (teams) * (mb) * 64, GMM__CAT(gmm9_blocks_, tag) = blocks, \
    GMM__CAT(gmm9_later_, tag) = later,
enum { GMM_SM90_TILE_LIST(GMM__X) gmm9_tiles_end };
#undef GMM__X
#define GMM__X(tag, teams, mb, units, st, out, groups, factor, blocks, later) \
    GMM__CAT(gmm9_of_, tag) = GMM__CAT(gmm9_factor_, factor), GMM__CAT(gmm9_box_, tag) = GMM__CAT(gmm9_box_, factor), \
    GMM__CAT(gmm9_width_, tag) = GMM__CAT(gmm9_width_, factor), \
    GMM__CAT(gmm9_b_, tag) = (teams) * (mb) * GMM__CAT(gmm9_block_, factor), \
    GMM__CAT(gmm9_scales_, tag) = (teams) * (mb) * GMM__CAT(gmm9_block_, factor) + (units) * 2048,
enum { GMM_SM90_TILE_LIST(GMM__X) gmm9_operands_end };
#undef GMM__X
#define GMM__X(tag, teams, mb, units, st, out, groups, factor, blocks, later) GMM__CAT(gmm9_stage_, tag) = \
    GMM__CAT(gmm9_scales_, tag) + GMM__CAT(gmm9_scales_, factor),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm9_stages_end };
#undef GMM__X
#define GMM__X(tag, teams, mb, units, st, out, groups, factor, blocks, later) \
    GMM__CAT(gmm9_room_, tag) = (out) * 2048, GMM__CAT(gmm9_rooms_, tag) = GMM__CAT(gmm9_stage_, tag) * (st), \
    GMM__CAT(gmm9_bars_, tag) = GMM__CAT(gmm9_stage_, tag) * (st) + 4 * (out) * 2048, \
    GMM__CAT(gmm9_ring_, tag) = (GMM__CAT(gmm9_stage_, tag) + 16) * (st) + 4 * (out) * 2048 + \
    8 * (GMM_SM90_RING + GMM_SM90_BATCHES + 10),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm9_rooms_end };
#undef GMM__X
#define GMM__X(tag, teams, mb, units, st, out, groups, factor, blocks, later) GMM__CAT(gmm9_shared_, tag) = \
    GMM__CAT(gmm9_ring_, tag) + (GMM_SM90_RING + 1) * 40 + 8 * ((groups) + 2),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm9_shared_end };
#undef GMM__X
#define GMM__X(tag, teams, mb, units, st, out, groups, factor, blocks, later) GMM__CAT(gmm9_fits_, tag) = \
    1 / (GMM__CAT(gmm9_shared_, tag) <= 233472 / (blocks) - 1024),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm9_fits_end };
#undef GMM__X
#define GMM__X(tag, teams, mb, units, st, out, groups, factor, blocks, later) \
    + 1 / ((out) % (mb) == 0 && (out) % 2 == 0 && (!(later) || ((teams) == 2 && (mb) == 1)) && \
           (units) % ((later) ? (later) : 1) == 0 && 2 * (out) % ((later) ? (later) : 1) == 0)
enum { gmm9_lots_fit = 0 GMM_SM90_TILE_LIST(GMM__X) };
#undef GMM__X
/* wgrad: a stage has room for whole boxes of A, a room for 64 rows by 256 bytes of D; groups of threads take turns */
#define GMM__X(op, dtype, tag, tile, kernel, which) \
    + 1 / (!gmm_ragged_k_##op || (GMM__CAT(gmm9_units_, tile) % 4 == 0 && GMM__CAT(gmm9_out_, tile) == 8 && \
                                  GMM__CAT(gmm9_teams_, tile) == 1 && GMM__CAT(gmm9_mb_, tile) == 2))
enum { gmm9_boxes_fit = 0 GMM_SM90_KERNEL_LIST(GMM__X) };
#undef GMM__X
/* tiles of one kernel have barriers at the same place */
enum { gmm9_two_fit = 1 / (gmm9_bars_256x160 == gmm9_bars_128x256 && gmm9_ring_256x160 == gmm9_ring_128x256) };

