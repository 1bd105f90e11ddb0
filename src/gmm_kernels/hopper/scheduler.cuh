/* State of the consumer warp groups, and behind it the tile scheduler of the Hopper products on the device: the split
   reader, the choice of a tile for the split, the sums of cluster tiles. schedule.cuh has the arithmetic and says
   what a cluster tile is. From gmm_sm90_lane_sum on, functions run in the scheduler warp of a CTA, unless they say
   otherwise. */

/* Bytes of a CTA's group tables (ends, work_ends) in the workspace. */
static GMM__UNUSED size_t gmm_sm90_table_bytes(int64_t groups) { return 8 * ((size_t)groups + 1); }

/* The operands of a tile as a consumer warp group reads them: stages of the contraction; wgmma descriptors of the warp
   group's columns (B) and of the rows (A) in stage 0; of packed weights the warp's codes and scales there. */
typedef struct gmm_sm90_operands {
    uint32_t k_tiles;
    uint64_t desc_b, desc_a;
    uint32_t packed_at, scales_at;
} gmm_sm90_operands;

/* The stores of a consumer warp group. With deferred stores, D of the previous tile is pending in registers. */
typedef struct gmm_sm90_store_state {
    const gmm_sm90_args *args;
    const gmm_sm90_tile *tile; /* the previous one */
    int wg;
    char *slots;               /* store slots of the warp group */
    int pending;               /* blocks of 16 rows of that tile that are not stored yet */
    uint32_t part;             /* parts stored so far: of the CTA in wgrad, else of this warp group; the next one is
                                  written to slot part % slots */
} gmm_sm90_store_state;

/* Where a consumer warp group stores a tile. */
typedef struct gmm_sm90_output {
    const gmm_gemm_args *p;
    const gmm_sm90_tile *tile;
    int wg, col0;      /* warp group, and its first column in the tile */
    char *d;           /* the tile's first row of D, at column 0 */
    int64_t pitch;     /* bytes from a row of D to the next */
    int size;          /* bytes of an element of D */
    float beta;
    char *slots;       /* the warp group's store slots */
    uint32_t slots_at; /* all store slots */
    uint32_t bars;     /* barriers of the slots */
} gmm_sm90_output;
/* Whether rows of D begin at multiples of 16 bytes. */
GMM__DEVICE int gmm_sm90_d_aligned(const gmm_sm90_output *out) {
    return (((uint64_t)(uintptr_t)out->d | (uint64_t)out->pitch) & 15) == 0;
}

/* Four neighbouring elements of D as stored, and one of them as fp32. Loading and decoding are two functions, so that
   all loads can be issued before the first value is decoded. */
GMM__DEVICE uint4 gmm_sm90_d_load4(int size, const char *from) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (size == 4) v = *(const uint4 *)from;
    else *(uint2 *)&v = *(const uint2 *)from;
    return v;
}
GMM__DEVICE float gmm_sm90_d_value(gmm_dtype dtype, const uint4 *v, int i) {
    const uint32_t whole = i == 0 ? v->x : i == 1 ? v->y : i == 2 ? v->z : v->w, half = i < 2 ? v->x : v->y;
    return dtype == GMM_F32 ? __uint_as_float(whole) : gmm_widen(dtype, (uint16_t)(half >> 16 * (i & 1)));
}

/* wgmma's N for a tile of `rows` rows, in units of 8: odd values exist only where they save most (GMM_WGMMA_LIST). */
GMM__DEVICE int gmm_sm90_wgmma_n8(int32_t rows) {
    const int n8 = (rows + 7) / 8;
    return n8 % 2 && n8 != 17 && n8 != 19 && n8 != 21 ? n8 + 1 : n8;
}

/* Inclusive prefix sum over the lanes of a warp. Loops over groups that are followed by warp-wide instructions take 32
   groups per pass, one per lane, and all lanes make every pass: if some left earlier, the code behind the loop would be
   issued once for each set of lanes, until the warp converges. */
GMM__DEVICE int32_t gmm_sm90_lane_sum(int32_t v) {
    const int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t i;
#pragma unroll
    for (i = 1; i < 32; i *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, v, (unsigned)i);
        if (lane >= i) v += other;
    }
    return v;
}

/* Brings the kernel parameters to the constant cache: warp w reads one word of line w, of 64 bytes. Without it the
   scheduler would wait for one cache miss per line, one after another. All warps. */
GMM__DEVICE void gmm_sm90_prefetch_params(const uint32_t *words, int bytes, int warp) {
    if (64 * warp < bytes) gmm_touch(words[16 * warp]);
}
/* Entry i of the split, clamped to [0, capacity]; 0 where it does not exist. Read from the L2, because the predecessor
   may still write it: it is read before griddepcontrol.wait and again after it. Words are loaded without a branch on
   the dtype, so that the loads of several entries are in flight together. */
GMM__DEVICE int32_t gmm_sm90_split_entry(const gmm_groups *s, int32_t i, int exists) {
    const int is_i64 = s->dtype == GMM_I64, capacity = (int32_t)s->capacity;
    const int *const words = (const int *)s->splits + (is_i64 ? 2 * (int64_t)i : i);
    const int low = exists ? __ldcg(words) : 0, high = exists && is_i64 ? __ldcg(words + 1) : low >> 31;
    return high < 0 ? 0 : high > 0 || low < 0 || low > capacity ? capacity : low;
}
/* Combines the end of a group with the entry of the next one, by the rule of gmm_split_end. It is associative. */
GMM__DEVICE int32_t gmm_sm90_split_end(int by_offsets, int32_t capacity, int32_t end, int32_t entry) {
    return by_offsets ? max(end, entry) : (int32_t)min((uint32_t)end + (uint32_t)entry, (uint32_t)capacity);
}
/* Inclusive scan of the entries of 32 groups, one per lane: their ends as if no row came before them. Whole warp. */
GMM__DEVICE int32_t gmm_sm90_scan_entries(const int by_offsets, int32_t capacity, int32_t entry) {
    const int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t i;
#pragma unroll
    for (i = 1; i < 32; i *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, entry, (unsigned)i);
        if (lane >= i) entry = gmm_sm90_split_end(by_offsets, capacity, other, entry);
    }
    return entry;
}
/* Whether the first tile is planned before griddepcontrol.wait. Then the plan may read the split alone, which is
   compared after the wait, and write shared memory alone: so neither group tables in the workspace, nor frozen and
   beta, which gmm_sm90_has_work reads in wgrad. All warps. */
GMM__DEVICE int gmm_sm90_plans_early(const gmm_gemm_args *p, const int32_t *tables, int k_grouped) {
    return !tables && !(k_grouped && (p->frozen || p->beta));
}
/* What the tile choice depends on besides the groups' ends: rows of the largest group, and non-empty groups. */
typedef struct gmm_sm90_split_stats {
    int32_t max_rows, nonempty;
} gmm_sm90_split_stats;
/* Reads the split by the rule of gmm_split_end and writes the groups' ends [G + 1]. Whole warp. */
GMM__DEVICE gmm_sm90_split_stats gmm_sm90_read_split(const gmm_groups *s, int32_t *ends) {
    const int by_offsets = s->form == GMM_SPLIT_OFFSETS;
    const int32_t capacity = (int32_t)s->capacity, lane = (int32_t)threadIdx.x & 31;
    gmm_sm90_split_stats stats = { 0, 0 };
    int32_t rows_before = 0, g;
    if (lane == 0) ends[0] = 0;
#pragma unroll 4
    for (g = lane; (g & ~31) < s->count; g += 32) {
        const int32_t entry = gmm_sm90_split_entry(s, g + by_offsets, g < s->count);
        if (g < s->count) ends[g + 1] = entry;
    }
#pragma unroll 1
    for (g = lane; (g & ~31) < s->count; g += 32) {
        int32_t end = g < s->count ? ends[g + 1] : 0, start;
        /* by_offsets is a constant within each scan, so that its steps need no select */
        if (by_offsets) end = gmm_sm90_scan_entries(1, capacity, end);
        else end = gmm_sm90_scan_entries(0, capacity, end);
        end = gmm_sm90_split_end(by_offsets, capacity, rows_before, end);
        start = __shfl_up_sync(0xFFFFFFFFu, end, 1);
        if (lane == 0) start = rows_before;
        if (g < s->count) ends[g + 1] = end;
        stats.max_rows = max(stats.max_rows, end - start);
        stats.nonempty += __popc(__ballot_sync(0xFFFFFFFFu, end > start));
        rows_before = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    stats.max_rows = __reduce_max_sync(0xFFFFFFFFu, stats.max_rows);
    __syncwarp();
    return stats;
}
/* Whether entry g of the split, as gmm_sm90_split_entry reads it again, contradicts `ends`. In a faulty split, whose
   ends were clamped, an entry may contradict them although it is the same. */
GMM__DEVICE int gmm_sm90_entry_changed(int32_t by_offsets, const int32_t *ends, int32_t g, int32_t entry) {
    return entry != ends[g + 1] - (by_offsets ? 0 : ends[g]);
}
/* Whether `ends`, which were read before griddepcontrol.wait, still describe the split after it. FP8 products. Whole
   warp. */
GMM__DEVICE int gmm_sm90_split_unchanged(const gmm_groups *s, const int32_t *ends) {
    const int32_t by_offsets = s->form == GMM_SPLIT_OFFSETS, lane = (int32_t)threadIdx.x & 31;
    int32_t g;
    int changed = 0;
#pragma unroll 4
    for (g = lane; (g & ~31) < s->count; g += 32) {
        const int exists = g < s->count;
        const int32_t entry = gmm_sm90_split_entry(s, g + by_offsets, exists);
        changed |= exists && gmm_sm90_entry_changed(by_offsets, ends, g, entry);
    }
    changed = __any_sync(0xFFFFFFFFu, changed);
    __syncwarp();
    return !changed;
}
/* The same in the check warp of 16-bit products, which also publishes the first tile if the split is unchanged. It
   loads all entries into registers before it waits until the plan is complete, so that the loads and the plan overlap.
   After griddepcontrol.wait. */
GMM__DEVICE void gmm_sm90_check_split(const gmm_groups *s, const int32_t *ends, gmm_sm90_ring *ring, uint32_t bars) {
    const int32_t by_offsets = s->form == GMM_SPLIT_OFFSETS, lane = (int32_t)threadIdx.x & 31;
    int32_t entry[GMM_SM90_SMEM_GROUPS / 32];
    int changed = 0, i;
#pragma unroll
    for (i = 0; i < GMM_SM90_SMEM_GROUPS / 32; i++) {
        const int32_t g = 32 * i + lane;
        entry[i] = 32 * i >= s->count ? 0 : gmm_sm90_split_entry(s, g + by_offsets, g < s->count);
    }
    gmm_mbarrier_wait(gmm_sm90_first_tile_planned(bars), 0);
#pragma unroll
    for (i = 0; i < GMM_SM90_SMEM_GROUPS / 32; i++) {
        const int32_t g = 32 * i + lane;
        if (32 * i >= s->count) break;
        changed |= g < s->count && gmm_sm90_entry_changed(by_offsets, ends, g, entry[i]);
    }
    changed = __any_sync(0xFFFFFFFFu, changed);
    if (lane == 0) {
        ring->planned_late = changed;
        gmm_mbarrier_arrive(gmm_sm90_split_checked(bars));
        if (!changed) gmm_mbarrier_arrive(gmm_sm90_tile_full(bars, 0));
    }
    __syncwarp();
}
/* Sets the fault bits of the split that `ends` come from, and of the table of weights. Whole warp. */
GMM__DEVICE void gmm_sm90_report_faults(const gmm_groups *s, const gmm_gemm_args *p, const int32_t *ends) {
    const int by_offsets = s->form == GMM_SPLIT_OFFSETS;
    uint32_t fault = by_offsets && gmm_split_value(s, 0) != 0 ? (uint32_t)GMM_FAULT_MONOTONIC : 0;
    int32_t g;
    if (!s->fault) return;
#pragma unroll 1
    for (g = (int32_t)threadIdx.x & 31; g < s->count; g += 32) {
        (void)gmm_split_end(ends[g], gmm_split_value(s, g + by_offsets), s->form, s->capacity, s->row_align, &fault);
        if (p->b.table && ((uintptr_t)p->b.table[g] & 15)) fault |= (uint32_t)GMM_FAULT_ADDRESS;
    }
    if (fault) atomicOr(s->fault, fault);
}

GMM__DEVICE gmm_sm90_cta gmm_sm90_this_cta(void) {
    gmm_sm90_cta cta;
    cta.cluster_size = (int32_t)gmm_cluster_nctarank();
    cta.cta_rank = (int32_t)gmm_cluster_ctarank();
    return cta;
}

/* Tiles along the columns of D for tiles of at most `tile_rows` rows: `min_tiles`, or, where no group has more rows
   than one tile, as many more as fill the last round of the grid. Their widths are nearly equal multiples of
   `col_align` columns. */
GMM__DEVICE int32_t gmm_sm90_tiles_n(const gmm_gemm_args *p, int32_t min_tiles, int32_t col_align, int32_t tile_rows,
                                     int32_t cluster_size, gmm_sm90_split_stats stats) {
    const int32_t max_tiles = (p->n + col_align - 1) / col_align, grid = (int32_t)gridDim.x;
    if (stats.max_rows > tile_rows || stats.nonempty == 0) return min_tiles;
    return gmm_sm90_filling_tiles(stats.nonempty, min_tiles, max_tiles, grid, cluster_size,
                                  stats.max_rows <= GMM_SM90_SMALL_M);
}

/* Whether group g of wgrad has work: frozen groups and empty groups with beta 1 have none. */
GMM__DEVICE int gmm_sm90_has_work(const gmm_gemm_args *p, int32_t g, int32_t rows) {
    return !(p->frozen && p->frozen[g]) && !(rows == 0 && gmm_gemm_beta(p, g) == 1.0f);
}
/* Writes work_ends and s->odd_tiles. Whole warp. */
GMM__DEVICE void gmm_sm90_count_work(gmm_sm90_scheduler *s, int32_t cluster_size) {
    const int32_t G = s->p->groups, lane = (int32_t)threadIdx.x & 31;
    int32_t tiles_before = 0, g;
    if (lane == 0) s->work_ends[0] = 0;
#pragma unroll 1
    for (g = lane; (g & ~31) < G; g += 32) {
        int32_t tiles = 0;
        if (g < G && (!s->k_grouped || gmm_sm90_has_work(s->p, g, s->ends[g + 1] - s->ends[g])))
            tiles = gmm_sm90_group_tiles(s, g, cluster_size);
        tiles = tiles_before + gmm_sm90_lane_sum(tiles);
        /* if the number of all tiles is odd, the last one is a cluster tile by itself */
        if (g < G) s->work_ends[g + 1] = (tiles + (g == G - 1 ? cluster_size - 1 : 0)) >> (cluster_size - 1);
        tiles_before = __shfl_sync(0xFFFFFFFFu, tiles, 31);
    }
    s->odd_tiles = tiles_before & (cluster_size - 1);
    __syncwarp();
}

/* The time that D of a tile takes, in stages of 16-bit products (measured with few tokens): 13 stages for fp32 that is
   read and written. FP8 passes twice as much to gmm_sm90_plan_balance, since it multiplies 64 rows in half the time. */
GMM__DEVICE int32_t gmm_sm90_d_stages(const gmm_gemm_args *p) {
    return gmm_kmat_size(&p->d) * (p->beta || p->beta_all != 0.0f ? 2 : 1) * 13 / 8;
}
/* Writes the groups to `order`, the longest first, equal ones by number. Whole warp. */
GMM__DEVICE void gmm_sm90_sort_groups(const int32_t *ends, int32_t groups, unsigned char *order) {
    int32_t g, i;
#pragma unroll 1
    for (g = (int32_t)threadIdx.x & 31; g < groups; g += 32) {
        const int32_t k = ends[g + 1] - ends[g];
        int32_t index = 0;
#pragma unroll 8
        for (i = 0; i < groups; i++) {
            const int32_t other = ends[i + 1] - ends[i];
            index += other > k || (other == k && i < g);
        }
        order[index] = (unsigned char)g;
    }
}
/* Decides whether a wgrad takes its tiles in the balanced order, and prepares it. Returns the decision, s->balanced.
   b, ends: in shared memory; with the pointers of s, which may be to the workspace, the code would need more registers.
   capacity: groups that the tables in shared memory serve, 0 where the workspace has the tables. min_load: see
   gmm_sm90_balance. Whole warp. */
GMM__DEVICE int gmm_sm90_plan_balance(gmm_sm90_scheduler *s, gmm_sm90_split_stats stats, int32_t capacity,
                                      int32_t min_load, gmm_sm90_balance *b, const int32_t *ends) {
    const int32_t cluster_size = (int32_t)gmm_cluster_nctarank(), clusters = (int32_t)gridDim.x >> (cluster_size - 1);
    int32_t c;
    s->balanced = clusters <= GMM_SM90_BALANCE_CLUSTERS && capacity >= GMM_SM90_BALANCE_GROUPS &&
                  s->p->groups <= GMM_SM90_BALANCE_GROUPS &&
                  gmm_sm90_is_skewed(ends[s->p->groups], stats.max_rows, stats.nonempty);
    if (!s->balanced) return 0;
    gmm_sm90_sort_groups(ends, s->p->groups, b->order);
#pragma unroll 1
    for (c = (int32_t)threadIdx.x & 31; c < clusters; c += 32) b->load[c] = 0;
    if ((threadIdx.x & 31) == 0) {
        const int32_t work = gmm_sm90_group_tiles(s, 0, cluster_size) >> (cluster_size - 1);
        b->rounds = work / clusters;
        b->rest = work % clusters;
        b->min_load = min_load;
        b->cluster = (int32_t)blockIdx.x >> (cluster_size - 1);
        b->clusters = clusters;
        b->position = -1;
        b->first = b->count = b->below = 0;
    }
    __syncwarp();
    return 1;
}
/* Gives the rest of the group at hand, b->count cluster tiles, to the clusters with the least load, one each. Lane l
   has clusters l, l + 32, ...; a search finds the most load with which a cluster takes one. Whole warp. */
GMM__DEVICE void gmm_sm90_assign_rest(gmm_sm90_balance *b, const int32_t *ends, int32_t groups) {
    enum { CLUSTERS = GMM_SM90_BALANCE_CLUSTERS / 32 };
    const int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t loads[CLUSTERS], bound = 0, high = 1, below = 0, rest, bit, j;
#pragma unroll
    for (j = 0; j < CLUSTERS; j++) {
        const int exists = lane + 32 * j < b->clusters;
        loads[j] = exists ? b->load[lane + 32 * j] : 0x7FFFFFFF;
        if (exists) high = max(high, loads[j]);
    }
    /* bit by bit, the largest load such that less than b->count clusters stay below it */
#pragma unroll 1
    for (bit = 1 << (31 - __clz(__reduce_max_sync(0xFFFFFFFFu, high))); bit > 0; bit >>= 1) {
        int32_t count = 0;
#pragma unroll
        for (j = 0; j < CLUSTERS; j++) count += __popc(__ballot_sync(0xFFFFFFFFu, loads[j] < bound + bit));
        if (count < b->count) bound += bit;
    }
    rest = b->count;
#pragma unroll
    for (j = 0; j < CLUSTERS; j++) {
        const int32_t mine = b->load[b->cluster], c = lane + 32 * j;
        below += __popc(__ballot_sync(0xFFFFFFFFu, loads[j] < mine || (loads[j] == mine && c < b->cluster)));
        rest -= __popc(__ballot_sync(0xFFFFFFFFu, loads[j] < bound));
    }
    __syncwarp(); /* all lanes have read the loads and the count */
    if (lane == 0) {
        b->below = below;
        b->count = below < b->count;
    }
#pragma unroll
    for (j = 0; j < CLUSTERS; j++) { /* of the clusters with that load, the first `rest` take one */
        const uint32_t equal = __ballot_sync(0xFFFFFFFFu, loads[j] == bound);
        const int32_t g = b->order[b->position - groups];
        if (loads[j] < bound || (loads[j] == bound && __popc(equal & ((1u << lane) - 1)) < rest))
            b->load[lane + 32 * j] = loads[j] + gmm_sm90_tile_load(b, ends[g + 1] - ends[g]);
        rest -= __popc(equal);
    }
    __syncwarp();
}
/* The group of the cluster's cluster tile number `index` in the balanced order, and the number within the group; G and
   -1 behind the last. Whole warp. */
GMM__DEVICE int32_t gmm_sm90_balanced_tile(gmm_sm90_balance *b, const int32_t *ends, const gmm_gemm_args *p,
                                           int32_t index, int32_t *work) {
    while (index >= b->first + b->count) {
        const int32_t position = gmm_sm90_next_position(b, p->groups);
        int32_t g;
        if (position >= 2 * p->groups) {
            *work = -1;
            return p->groups;
        }
        g = b->order[position < p->groups ? position : position - p->groups];
        __syncwarp(); /* all lanes have read the position */
        if ((threadIdx.x & 31) == 0) {
            b->first += b->count;
            b->position = position;
            b->count = !gmm_sm90_has_work(p, g, ends[g + 1] - ends[g]) ? 0
                       : position < p->groups                         ? b->rounds
                                                                      : b->rest;
        }
        __syncwarp();
        if (position >= p->groups) gmm_sm90_assign_rest(b, ends, p->groups);
    }
    *work = gmm_sm90_balanced_work(b, p->groups, index - b->first);
    return b->order[b->position < p->groups ? b->position : b->position - p->groups];
}

/* A tile of a kernel: columns, and the most blocks of 16 rows. m16 is 0 where the kernel has no such tile. */
typedef struct gmm_sm90_tile_shape {
    int32_t n, m16;
} gmm_sm90_tile_shape;

/* The price model of the tile scheduler: chooses the tile, unless `choice` (gmm_sm90_tile_choice) demands one, and its
   height in blocks of 16 rows that take the least time for the split. Returns the height; *chosen: whether the tile is
   `second`. Results do not depend on the choice. Candidates are numbered by tile, then by height from m16 downwards: to
   3/4 of m16 if power_limited, else to m16 / 2 + 1. Eight at most, since four lanes evaluate each candidate.
   power_limited: cooperative tiles of plain operands, whose clocks are linear in the height. They run at the power
   limit, so that CTAs which idle in the last round speed up the others: idle time counts 0.69 of its length. Not
   power_limited: ping-pong tiles, and packed weights, for which an order of heights is enough. Their clocks are the
   maximum of products, shared-memory traffic and store. Constants are clocks of one H200 (KERNELS.md, "Clock and power
   limit"). gmm__wgmma_choose prices kernels on the host for average sizes, by constants of its own (wgmma_price.h).
   Whole warp. */
GMM__DEVICE int32_t gmm_sm90_choose_tile(const gmm_sm90_scheduler *s, gmm_sm90_split_stats stats, int32_t choice,
                                         const int power_limited, const gmm_sm90_tile_shape first,
                                         const gmm_sm90_tile_shape second, int32_t *chosen) {
    const int32_t n0 = first.n, m16_0 = first.m16, n1 = second.n, m16_1 = second.m16;
    const int32_t G = s->p->groups, heights0 = power_limited ? m16_0 / 4 + 1 : m16_0 - m16_0 / 2;
    const int32_t heights1 = m16_1 ? m16_1 / 4 + 1 : 0;
    float total_clocks = 0.0f, total_tiles = 0.0f, max_clocks = 0.0f, cost = 0.0f;
    uint32_t min_cost;
    int32_t i, candidate, is_second, valid;
    if (choice != gmm_sm90_tile_by_split) {
        /* where every group fits one tile of the lowest height, all heights cost the same */
        const int32_t tallest = choice ? m16_1 : m16_0;
        const int32_t lowest = tallest - (choice ? heights1 : heights0) + 1;
        *chosen = choice;
        if (stats.max_rows <= 16 * lowest) return tallest;
    }
    candidate = ((int32_t)threadIdx.x & 31) / 4;
    is_second = candidate >= heights0;
    {
        const float k_tiles = (float)gmm_sm90_k_tiles(s->p->k);
        const float inverse_height = __fdividef(1.0f, (float)(is_second ? m16_1 + heights0 - candidate
                                                                        : m16_0 - candidate));
        const int wide = (is_second ? n1 : n0) == 256;
        const float fixed = wide ? 48.0f * k_tiles + 2000.0f : 56.0f * k_tiles + 5800.0f;
        const float slope = wide ? 134.5f * k_tiles + 340.0f : 66.3f * k_tiles - 270.0f;
#pragma unroll 1
        for (i = (int32_t)threadIdx.x & 3; (i & ~3) < G; i += 4) {
            const int32_t rows = i < G ? s->ends[i + 1] - s->ends[i] : 0;
            const float blocks = (float)(rows + 8) * 0.0625f, /* of 16 rows, rounded by a half */
                        tiles = ceilf((blocks - 0.5f) * inverse_height);
            const float height = __fdividef(blocks, fmaxf(tiles, 1.0f));
            const float clocks = power_limited ? fixed + slope * height
                                               : fmaxf(k_tiles * fmaxf(256.0f + 44.0f * height, 64.0f * height),
                                                       330.0f * height) + 200.0f;
            total_tiles += tiles;
            total_clocks += tiles * clocks;
            if (tiles > 0.0f) max_clocks = fmaxf(max_clocks, clocks);
        }
    }
    for (i = 2; i > 0; i /= 2) {
        total_clocks += __shfl_xor_sync(0xFFFFFFFFu, total_clocks, i);
        total_tiles += __shfl_xor_sync(0xFFFFFFFFu, total_tiles, i);
        max_clocks = fmaxf(max_clocks, __shfl_xor_sync(0xFFFFFFFFu, max_clocks, i));
    }
    candidate = (gmm_tid_x() & 31) / 4; /* recomputed, so that no register holds it during the loop above */
    is_second = candidate >= heights0;
    valid = candidate < heights0 + heights1 && (choice == gmm_sm90_tile_by_split || choice == is_second);
    if (total_tiles > 0.0f) {
        const int32_t cols = heights1 > 0 && is_second ? n1 : n0; /* n1 is 0 where there is no second tile */
        const float tiles_per_cta = __fdividef((float)((s->p->n + cols - 1) / cols), (float)gridDim.x);
        const float rounds = total_tiles * tiles_per_cta;
        cost = __fdividef(ceilf(rounds), rounds);
        /* where the heights of tiles differ, some CTA gets more tall tiles than others */
        if (power_limited)
            cost = 0.31f + 0.69f * cost * (1.0f + 1.26f * (__fdividef(max_clocks * total_tiles, total_clocks) - 1.0f) *
                                                          rsqrtf(rounds));
        cost = fminf(cost * total_clocks * tiles_per_cta, 3.0e38f);
    }
    min_cost = __reduce_min_sync(0xFFFFFFFFu, valid ? __float_as_uint(cost) : 0x7FFFFFFFu);
    candidate = (__ffs((int)__ballot_sync(0xFFFFFFFFu, valid && __float_as_uint(cost) == min_cost)) - 1) / 4;
    *chosen = candidate >= heights0;
    return candidate >= heights0 ? m16_1 + heights0 - candidate : m16_0 - candidate;
}
