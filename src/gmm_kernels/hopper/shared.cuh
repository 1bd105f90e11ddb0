
/* Shared memory of the 16-bit Hopper products: one struct per tile, made from the columns of GMM_SM90_TILE_LIST. */

/* Keeps or drops a member by a column that is 0 or 1. */
#define GMM__IF_0(...)
#define GMM__IF_1(...) __VA_ARGS__
#define GMM__IF(condition, ...) GMM__CAT(GMM__IF_, condition)(__VA_ARGS__)

/* The persistent tile ring, and what else the scheduler and the check warp tell the other warps. */
typedef struct gmm_sm90_ring {
    gmm_sm90_tile tile[GMM_SM90_TILE_RING];
    int32_t second_tile;  /* whether the scheduler has chosen the kernel's second tile */
    int32_t small_m;      /* whether small-M mode is on: see GMM__SMALL_M */
    int32_t planned_late; /* whether the first tile is planned after griddepcontrol.wait: it was not planned early, or
                             the split has changed */
} gmm_sm90_ring;

/* A stage: operands as TMA writes them, in boxes of lines of 128 bytes with 128-byte swizzle (packed codes: lines of 64
   or 32 bytes). `scales`: word i holds the scales of column i; the words behind them keep stages at multiples of 1024
   bytes, which the swizzle needs. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    typedef struct GMM__SM90(stage, tag) { \
        char b[(consumers_) * (wgmma_m_)][GMM__SM90(b_bytes, b_format_)]; /* [64 columns] */ \
        char a[m16_][2048];                                               /* [16 rows] */ \
        GMM__IF(GMM__SM90_PACKED_##b_format_, uint32_t scales[256];) \
    } GMM__SM90(stage, tag);
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    typedef struct GMM__SM90(smem, tag) { \
        GMM__SM90(stage, tag) stage[stages_]; \
        char slot[GMM_SM90_STORE_SLOTS][(store_blocks_) * 2048]; \
        gmm_sm90_stage_barriers stage_bars[stages_]; gmm_sm90_barriers bars; gmm_sm90_ring ring; \
        int32_t ends[GMM_SM90_TABLE_LENGTH], work_ends[GMM_SM90_TABLE_LENGTH]; /* group tables of the scheduler */ \
    } GMM__SM90(smem, tag);
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
/* Sizes and offsets in bytes; scales_offset is 0 where a stage has no scales. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    GMM__SM90(a_offset, tag) = offsetof(GMM__SM90(stage, tag), a), \
    GMM__SM90(scales_offset, tag) = \
        GMM__IF(GMM__SM90_PACKED_##b_format_, offsetof(GMM__SM90(stage, tag), scales) +) 0, \
    GMM__SM90(b_block_bytes, tag) = GMM__SM90(b_bytes, b_format_), \
    GMM__SM90(stage_bytes, tag) = sizeof(GMM__SM90(stage, tag)), GMM__SM90(slot_bytes, tag) = (store_blocks_) * 2048, \
    GMM__SM90(smem_bytes, tag) = sizeof(GMM__SM90(smem, tag)),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_smem_end };
#undef GMM__X
/* What addresses and TMA assume of the layout. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(GMM__SM90(stage_bytes, tag) % 1024 == 0 && GMM__SM90(a_offset, tag) % 1024 == 0 && \
                  offsetof(GMM__SM90(smem, tag), slot) % 1024 == 0 && GMM__SM90(slot_bytes, tag) % 1024 == 0, \
                  "tile " #tag ": operands and slots begin at multiples of 1024 bytes, 8 lines of the swizzle");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(offsetof(GMM__SM90(smem, tag), stage_bars) % 8 == 0 && \
                  offsetof(GMM__SM90(smem, tag), bars) - offsetof(GMM__SM90(smem, tag), stage_bars) == \
                      16 * (stages_) && \
                  offsetof(GMM__SM90(smem, tag), work_ends) - offsetof(GMM__SM90(smem, tag), ends) == \
                      4 * GMM_SM90_TABLE_LENGTH, \
                  "tile " #tag ": barriers take 8 bytes each, and the tables follow one another as in the workspace");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(GMM__SM90(smem_bytes, tag) <= 233472 / (ctas_) - 1024, \
                  "tile " #tag ": a multiprocessor has 228 KiB of shared memory, and each CTA takes 1 KiB besides");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
static_assert(sizeof(gmm_sm90_balance) <= 4 * (GMM_SM90_BALANCE_GROUPS + 1), "the balanced order fits into work_ends");
static_assert(offsetof(gmm_sm90_smem_160x256, bars) == offsetof(gmm_sm90_smem_256x128, bars) &&
              offsetof(gmm_sm90_smem_160x256, ring) == offsetof(gmm_sm90_smem_256x128, ring) &&
              (int)gmm_sm90_stages_160x256 == (int)gmm_sm90_stages_256x128 &&
              (int)gmm_sm90_smem_bytes_160x256 == (int)gmm_sm90_smem_bytes_256x128,
              "the two tiles of a kernel have their barriers and their tile ring at the same offsets, and equal sizes");
