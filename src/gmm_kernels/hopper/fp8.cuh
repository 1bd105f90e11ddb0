/* ............................................................................ Grouped FP8 products on Hopper ... */

/* Products of FP8 copies, whose lines run along the contraction: fwd x and w ROWWISE, dgrad dy ROWWISE and w
   COLUMNWISE, wgrad dy and x COLUMNWISE. Pairs and stages are those of the 16-bit products, a stage 128 deep; D's rows
   are wgmma's first factor, E4M3 or E5M2, its columns the second, E4M3: 64 rows of a tile for each group of 128
   threads. A warp of its own places tiles, so that those who move operands never wait for that.

   The tensor cores keep 14 bits of an FP8 sum. Unless the caller allows it (fast), every 128 deep a sum of its own is
   added up in fp32, times the scales of its block: those of D's rows, two per thread, times one per 128 columns (rows),
   or times those of D's columns (both). A warp beside the producer brings them to shared memory. Scales of whole
   matrices and of lines are applied once, at the end; those of lines come to shared memory while products run.

   A group of threads leaves its sums in a room in shared memory, from where TMA takes them to D while the next tile is
   multiplied. What they are added to in fp32 TMA brings to the room before, while they are made. Between the parts of a
   tile that a room does not hold whole, that would be waited for: where sums are deep TMA adds the later parts to D
   itself, which takes it longer (1.3 TB/s), but nobody waits. What TMA cannot do (D where rows are not at multiples of
   16 bytes, adding to 16 bits) threads do. */
typedef struct gmm_fp8_args {
    CUtensorMap a, b, d;      /* boxes: A 64 lines, B 64 lines, D 64 rows of 128 bytes */
    gmm_gemm_args p;          /* offsets and tiles are not read; a and b are the copies' codes, a line per row */
    gmm_groups groups;        /* splits in device memory */
    gmm_mat a_scale, b_scale; /* scaling, scale, scale_table in device memory */
    int32_t *tables;          /* more groups than the kernel has room for: gmm_fp8_table_bytes per block */
    int32_t wgrad;
    int32_t b_columnwise;     /* b is a COLUMNWISE copy: dgrad's weight */
} gmm_fp8_args;

enum { GMM_FP8_UNIT = 64, GMM_FP8_TILE_BYTES = 64 }; /* rows of a tile per group of threads */

/* Tiles: X(tag, groups of threads, columns, stages, boxes of 64 rows by 128 bytes in a room, groups that fit, registers
   of threads that multiply and of the rest, whether fwd and dgrad guess their first tile). Guessing is for few tokens:
   with many, 192x128 loses up to 4% by it. Rooms of 128x192_held hold whole tiles of fp32, for a stage. */
#define GMM_FP8_TILE_LIST(X) \
    X(192x128, 3, 128, 4, 2, 256, 152, 56, 0) \
    X(192x128_few, 3, 128, 4, 2, 256, 152, 56, 1) \
    X(128x192, 2, 192, 4, 3, 256, 232, 40, 0) \
    X(128x192_few, 2, 192, 4, 3, 256, 224, 56, 1) \
    X(128x192_held, 2, 192, 3, 6, 256, 232, 40, 0)

/* What a block's sum is multiplied by: X(tag, value, bytes of scales per stage: per group of threads, besides, per
   column) */
enum { GMM_FP8_FAST, GMM_FP8_ROWS, GMM_FP8_BOTH };
#define GMM_FP8_SUM_LIST(X) \
    X(fast, GMM_FP8_FAST, 0, 0, 0) \
    X(rows, GMM_FP8_ROWS, 256, 16, 0) \
    X(both, GMM_FP8_BOTH, 256, 0, 4)

/* Instances: X(dtype of D's rows' factor, tag, sums, tile); the includes below follow the same list. */
#define GMM_FP8_KERNEL_LIST(X) \
    X(GMM_E4M3, e4m3, rows, 192x128) X(GMM_E5M2, e5m2, rows, 192x128) \
    X(GMM_E4M3, e4m3, rows, 192x128_few) X(GMM_E5M2, e5m2, rows, 192x128_few) \
    X(GMM_E4M3, e4m3, rows, 128x192_few) X(GMM_E5M2, e5m2, rows, 128x192_few) \
    X(GMM_E4M3, e4m3, both, 128x192_held) X(GMM_E5M2, e5m2, both, 128x192_held) \
    X(GMM_E4M3, e4m3, fast, 128x192) X(GMM_E5M2, e5m2, fast, 128x192)

/* Shared memory: stages of B and A, a room per group of threads, barriers, tiles, groups, the scales of 64 rows and of
   a tile's columns per group of threads, scales of stages. */
#define GMM__X(tag, teams, cols, st, boxes, groups, high, low, guess) GMM__CAT(gmm11_teams_, tag) = teams, \
    GMM__CAT(gmm11_cols_, tag) = cols, GMM__CAT(gmm11_stages_, tag) = st, GMM__CAT(gmm11_boxes_, tag) = boxes, \
    GMM__CAT(gmm11_groups_, tag) = groups, GMM__CAT(gmm11_guess_, tag) = guess, \
    GMM__CAT(gmm11_high_, tag) = high, GMM__CAT(gmm11_low_, tag) = low, GMM__CAT(gmm11_a_, tag) = 128 * (cols), \
    GMM__CAT(gmm11_stage_, tag) = 128 * (cols) + 8192 * (teams), GMM__CAT(gmm11_threads_, tag) = 128 * (teams) + 128,
enum { GMM_FP8_TILE_LIST(GMM__X) gmm11_tiles_end };
#undef GMM__X
#define GMM__X(tag, value, group, all, col) GMM__CAT(gmm11_sums_, tag) = value, GMM__CAT(gmm11_group_, tag) = group, \
    GMM__CAT(gmm11_all_, tag) = all, GMM__CAT(gmm11_col_, tag) = col,
enum { GMM_FP8_SUM_LIST(GMM__X) gmm11_sums_end };
#undef GMM__X
#define GMM__X(tag, teams, cols, st, boxes, groups, high, low, guess) \
    GMM__CAT(gmm11_rooms_, tag) = GMM__CAT(gmm11_stage_, tag) * (st), \
    GMM__CAT(gmm11_bars_, tag) = GMM__CAT(gmm11_stage_, tag) * (st) + 8192 * (boxes) * (teams),
enum { GMM_FP8_TILE_LIST(GMM__X) gmm11_rooms_end };
#undef GMM__X
#define GMM__X(tag, teams, cols, st, boxes, groups, high, low, guess) GMM__CAT(gmm11_ring_, tag) = \
    GMM__CAT(gmm11_bars_, tag) + 16 * (st) + 16 * GMM_SM90_RING + 16 * (teams) + 32 * (guess),
enum { GMM_FP8_TILE_LIST(GMM__X) gmm11_ring_end };
#undef GMM__X
#define GMM__X(tag, teams, cols, st, boxes, groups, high, low, guess) GMM__CAT(gmm11_lines_, tag) = \
    (GMM__CAT(gmm11_ring_, tag) + GMM_FP8_TILE_BYTES * GMM_SM90_RING + 12 * ((groups) + 1) + 15) / 16 * 16,
enum { GMM_FP8_TILE_LIST(GMM__X) gmm11_lines_end };
#undef GMM__X
#define GMM__X(tag, teams, cols, st, boxes, groups, high, low, guess) GMM__CAT(gmm11_factors_, tag) = \
    GMM__CAT(gmm11_lines_, tag) + (256 + 4 * (cols)) * (teams),
enum { GMM_FP8_TILE_LIST(GMM__X) gmm11_factors_end };
#undef GMM__X
#define GMM__X(dtype, tag, sums, tile) gmm11_shared_##tag##_##sums##_##tile = GMM__CAT(gmm11_factors_, tile) + \
    GMM__CAT(gmm11_stages_, tile) * (GMM__CAT(gmm11_group_, sums) * GMM__CAT(gmm11_teams_, tile) + \
    GMM__CAT(gmm11_all_, sums) + GMM__CAT(gmm11_col_, sums) * GMM__CAT(gmm11_cols_, tile)),
enum { GMM_FP8_KERNEL_LIST(GMM__X) gmm11_shared_end };
#undef GMM__X
#define GMM__X(dtype, tag, sums, tile) gmm11_fits_##tag##_##sums##_##tile = \
    1 / (gmm11_shared_##tag##_##sums##_##tile <= 232448),
enum { GMM_FP8_KERNEL_LIST(GMM__X) gmm11_fits_end };
#undef GMM__X

static GMM__UNUSED size_t gmm_fp8_table_bytes(int64_t groups) { return 12 * ((size_t)groups + 1); }

/* A float to shared memory, or +0 where it is not there. */
GMM__DEVICE void gmm_fetch4(uint32_t to, const float *from, int there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 : : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(there ? 4 : 0) : "memory");
}

/* A descriptor from its low half, which holds all that differs between operands in lines of 128 bytes. */
GMM__DEVICE uint64_t gmm_wgmma_whole(uint32_t low) { return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | low; }
/* How a tile's sums go out: as 16-bit elements, by TMA, added to what it has brought; all parts but the first added to
   D by TMA. */
enum { GMM_FP8_NARROW = 1, GMM_FP8_WHOLE = 2, GMM_FP8_ADDED = 4, GMM_FP8_REDUCED = 8 };
enum { GMM_FP8_DEEP = 768 }; /* of sums: from here on what TMA adds is hidden behind them */

/* A tile, where its group's rows start in padded copies, what its sums are multiplied by as a whole (gmm_fp8_outer),
   how they go out, and for TMA the last three coordinates of its first row in D. */
typedef struct gmm_fp8_tile {
    gmm_sm90_tile t;
    int32_t start;
    float all;
    int32_t out, y, z, w;
} gmm_fp8_tile;

/* Stages of a tile. An empty sum takes one, of nothing: stages are what keeps the ring of tiles from being overrun. */
GMM__DEVICE uint32_t gmm_fp8_depths(int32_t k) { return k > 0 ? (uint32_t)(k + 127) / 128 : 1; }

/* Prefix sums of the groups' rows in padded copies [G + 1]. One warp. */
GMM__DEVICE void gmm_fp8_starts(int32_t groups, const int32_t *ends, int32_t *starts) {
    int32_t total = 0, g;
    const int32_t last = gmm_sm90_run(groups, &g);
#pragma unroll 1
    for (; g < last; g++)
        starts[g + 1] = total += (ends[g + 1] - ends[g] + GMM_GROUP_ROWS - 1) / GMM_GROUP_ROWS * GMM_GROUP_ROWS;
    gmm_sm90_prefix(groups, total, starts);
}

/* The first scale of a tile's group. Lines of A are rows, or in wgrad D's rows; lines of B are D's columns. */
GMM__DEVICE const float *gmm_fp8_scales_a(const gmm_fp8_args *args, const gmm_fp8_tile *t, int64_t *step) {
    const gmm_direction direction = args->wgrad ? GMM_COLUMNWISE : GMM_ROWWISE;
    const gmm__qview v = gmm__qview_of(&args->a_scale, direction, 1, t->t.g, t->t.row, t->start, t->t.end - t->t.row,
                                       args->wgrad ? args->p.m : args->p.k);
    *step = gmm__qview_scale(&v, 0, 1);
    return (const float *)(const void *)v.scale;
}
GMM__DEVICE const float *gmm_fp8_scales_b(const gmm_fp8_args *args, const gmm_fp8_tile *t, int64_t *step,
                                          int64_t *block) {
    const gmm_direction direction = args->wgrad || args->b_columnwise ? GMM_COLUMNWISE : GMM_ROWWISE;
    const int64_t rows = args->wgrad ? t->t.end - t->t.row : args->b_columnwise ? args->p.k : args->p.n;
    const int64_t cols = args->b_columnwise || args->wgrad ? args->p.n : args->p.k;
    const gmm__qview v = gmm__qview_of(&args->b_scale, direction, args->wgrad, t->t.g, args->wgrad ? t->t.row : 0,
                                       args->wgrad ? t->start : 0, rows, cols);
    *step = gmm__qview_scale(&v, 0, 1);
    *block = gmm__qview_scale(&v, 128, 0);
    return (const float *)(const void *)v.scale;
}

/* What D_g is multiplied by as a whole; an empty sum is +0, whatever the sign of alpha. GMM_FP8_EXTREME, a NaN that no
   product is, if the product leaves the range of normal numbers on its way: then gmm_fp8_outer_extreme has it. */
enum { GMM_FP8_EXTREME = 0x7FC0E001 };
GMM__DEVICE float gmm_fp8_outer(const gmm_fp8_args *args, const gmm_sm90_tile *t) {
    float all = 1.0f;
    int extreme;
    if (t->k == 0) return all;
    if (args->p.alpha) all = args->p.alpha[args->p.alpha_per_group ? t->g : 0];
    if (args->a_scale.scaling == GMM_SCALING_TENSOR) all = __fmul_rn(all, ((const float *)args->a_scale.scale)[t->g]);
    extreme = !gmm__scale_normal(all);
    if (args->b_scale.scaling == GMM_SCALING_TENSOR)
        all = __fmul_rn(all, args->b_scale.scale_table ? *(const float *)args->b_scale.scale_table[t->g]
                                                       : ((const float *)args->b_scale.scale)[t->g]);
    return extreme || !gmm__scale_normal(all) ? gmm_f32_from_bits(GMM_FP8_EXTREME) : all;
}
/* Two factors that stand for the product, to multiply by one after the other. */
GMM__DEVICE float gmm_fp8_outer_extreme(const gmm_fp8_args *args, const gmm_sm90_tile *t, float *second) {
    gmm__scale all = gmm__scale_of(args->p.alpha ? args->p.alpha[args->p.alpha_per_group ? t->g : 0] : 1.0f);
    if (args->a_scale.scaling == GMM_SCALING_TENSOR)
        all = gmm__scale_times(all, ((const float *)args->a_scale.scale)[t->g]);
    if (args->b_scale.scaling == GMM_SCALING_TENSOR)
        all = gmm__scale_times(all, args->b_scale.scale_table ? *(const float *)args->b_scale.scale_table[t->g]
                                                              : ((const float *)args->b_scale.scale)[t->g]);
    return gmm__scale_split(all, second);
}

/* Fills in how a tile goes out. */
GMM__DEVICE void gmm_fp8_way_out(const gmm_fp8_args *args, gmm_fp8_tile *f) {
    const uint64_t d = (uint64_t)(uintptr_t)gmm_kmat_at(&args->p.d, f->t.g), to = d - GMM_SM90_BASE;
    const int size = gmm_kmat_size(&args->p.d);
    const float beta = gmm_gemm_beta(&args->p, f->t.g);
    f->out = size == 2 && beta == 0.0f ? GMM_FP8_NARROW : 0;
    if (((d | (uint64_t)(args->p.d.ld * size)) & 15) == 0 && (beta == 0.0f || size == 4)) {
        f->out |= GMM_FP8_WHOLE | (beta == 0.0f ? 0 : GMM_FP8_ADDED);
        if (beta == 1.0f && f->t.k >= GMM_FP8_DEEP) f->out |= GMM_FP8_REDUCED;
    }
    f->y = f->t.m0 + (args->wgrad ? 0 : GMM_SM90_RAGGED - (f->t.end - f->t.row));
    f->z = args->wgrad ? (int32_t)(to >> 4 & 0x3FFF) : f->t.end;
    f->w = args->wgrad ? (int32_t)(to >> 18) : GMM_SM90_RAGGED;
}

/* How a launch starts early. By the split as it stands before it is waited for, a block places its first tile; right
   behind the wait it asks for the operands of that and multiplies them. Whether the tile was the right one is looked at
   meanwhile; if not, nothing of it goes out, and the block takes its first tile again behind all others. Blocks of a
   cluster hand stages back to one another, and must take the same number: a tile of nothing takes as many, and where
   one takes its first tile again, the other takes nothing once more. */

/* A tile of nothing. */
GMM__DEVICE void gmm_fp8_nothing(const gmm_fp8_args *args, gmm_fp8_tile *f) {
    memset(f, 0, sizeof *f);
    f->t.units = 1;
    f->t.k = args->p.k;
}

/* What gmm_sm90_split, _across, _count and gmm_fp8_starts do for fwd and dgrad, in one go: a lane asks for the entries
   of its up to `run` groups all at once. Few have less code, which runs once and so is waited for. `known`: returns 0
   if `ends` come from the same entries; or else the tiles across. One warp. */
enum { GMM_FP8_RUN = 4 };
GMM__DEVICE int32_t gmm_fp8_plan(const gmm_fp8_args *args, const int run, int known, int flat, int32_t cols,
                                 int32_t step, int32_t teams, int32_t pair, int32_t *ends, int32_t *items,
                                 int32_t *starts) {
    const int by_offsets = args->groups.form == GMM_SPLIT_OFFSETS;
    const int32_t lane = (int32_t)threadIdx.x & 31;
    gmm_sm90_sizes of = { 0, 0 };
    int32_t v[GMM_FP8_RUN], end = 0, all = 0, padded = 0, first = lane, across, i, j;
    const int32_t last = run > 1 ? gmm_sm90_run(args->p.groups, &first) : min(lane + 1, args->p.groups);
    int other = !known;
#pragma unroll
    for (j = 0; j < run; j++) /* nothing behind the last */
        v[j] = first + j < last ? gmm_sm90_entry(&args->groups, first + j + by_offsets) : 0;
#pragma unroll
    for (j = 0; j < run; j++)
        if (known && first + j < last) other |= v[j] != ends[first + j + 1] - (by_offsets ? 0 : ends[first + j]);
    if (!__any_sync(0xFFFFFFFFu, other)) return 0;
    __syncwarp(); /* all have read the ends */
#pragma unroll
    for (j = 0; j < run; j++) end = gmm_sm90_after(&args->groups, end, v[j]);
#pragma unroll
    for (i = 1; i < 32; i *= 2) {
        const int32_t before = __shfl_up_sync(0xFFFFFFFFu, end, (unsigned)i);
        if (lane >= i) end = gmm_sm90_after(&args->groups, before, end);
    }
    end = __shfl_up_sync(0xFFFFFFFFu, end, 1);
    if (lane == 0) end = ends[0] = items[0] = starts[0] = 0;
#pragma unroll
    for (j = 0; j < run; j++) {
        const int32_t start = end;
        end = gmm_sm90_after(&args->groups, end, v[j]);
        of.longest = max(of.longest, end - start);
        of.live += end > start;
        if (first + j < last) ends[first + j + 1] = end;
    }
    of.longest = __reduce_max_sync(0xFFFFFFFFu, of.longest);
    of.live = __reduce_add_sync(0xFFFFFFFFu, of.live);
    across = gmm_sm90_across(&args->p, (args->p.n + cols - 1) / cols, step, GMM_FP8_UNIT * teams, pair, of);
    __syncwarp();
#pragma unroll 1
    for (j = first; j < last; j++) {
        const int32_t m = ends[j + 1] - ends[j];
        items[j + 1] = all += gmm_sm90_items(gmm_sm90_tiles(m, GMM_FP8_UNIT, teams), across, pair, flat);
        starts[j + 1] = padded += (m + GMM_GROUP_ROWS - 1) / GMM_GROUP_ROWS * GMM_GROUP_ROWS;
    }
    {
        const int32_t mine = all, rows = padded;
#pragma unroll
        for (i = 1; i < 32; i *= 2) {
            const int32_t a = __shfl_up_sync(0xFFFFFFFFu, all, (unsigned)i);
            const int32_t b = __shfl_up_sync(0xFFFFFFFFu, padded, (unsigned)i);
            if (lane >= i) all += a, padded += b;
        }
        all -= mine;
        padded -= rows;
    }
#pragma unroll 1
    for (j = first; j < last; j++) {
        items[j + 1] += all;
        starts[j + 1] += padded;
    }
    __syncwarp();
    return across;
}

/* The first tile of a block by the split as it stands. Blocks of a cluster may have read different splits, so that they
   share nothing. One warp. */
GMM__DEVICE void gmm_fp8_first(const gmm_fp8_args *args, const int32_t *ends, const int32_t *items,
                               const int32_t *starts, int flat, int32_t across, int32_t step, int32_t teams,
                               int32_t pair, int32_t rank, gmm_fp8_tile *f) {
    const int32_t item = (int32_t)blockIdx.x / pair;
    int32_t g = 0, m;
    gmm_fp8_nothing(args, f);
    if (item >= items[args->p.groups]) return;
    gmm_find_group32(items, args->p.groups, item, &g);
    f->t.g = g;
    f->start = starts[g];
    m = ends[g + 1] - ends[g];
    if (m <= GMM_FP8_UNIT * teams) { /* what gmm_sm90_place comes to for one tile of rows */
        const int32_t tn = pair * (item - items[g]) + rank, steps = (args->p.n + step - 1) / step;
        if (tn >= across) { /* no partner */
            gmm_fp8_nothing(args, f);
            return;
        }
        f->t.row = ends[g];
        f->t.end = ends[g + 1];
        f->t.rows = m;
        f->t.units = (m + GMM_FP8_UNIT - 1) / GMM_FP8_UNIT;
        f->t.n0 = step * gmm_sm90_begin(steps, across, tn);
        f->t.cols = step * gmm_sm90_begin(steps, across, tn + 1) - f->t.n0;
        if (f->t.cols > args->p.n - f->t.n0) f->t.cols = args->p.n - f->t.n0;
    } else {
        gmm_sm90_place(&args->p, 0, ends, items, item, 0, flat, across, step, GMM_FP8_UNIT, teams, GMM_FP8_UNIT, pair,
                       rank, &f->t);
        f->t.share = 0;
    }
}
/* Whether what was multiplied as the first tile is it, or nothing was and there is none. */
GMM__DEVICE int gmm_fp8_right(const gmm_fp8_tile *f, const gmm_fp8_tile *first) {
    return (f->t.cols <= 0 && first->t.cols <= 0) ||
           (f->t.g == first->t.g && f->t.row == first->t.row && f->t.end == first->t.end && f->t.m0 == first->t.m0 &&
            f->t.rows == first->t.rows && f->t.n0 == first->t.n0 && f->t.cols == first->t.cols &&
            f->start == first->start);
}
/* Tells the other block of a cluster (`word` and `bar` there) whether this one's first tile was wrong. One lane. */
GMM__DEVICE void gmm_fp8_confess(uint32_t word, uint32_t bar, int wrong) {
    gmm_bar_expect(bar, 4);
    asm volatile("{\n .reg .b32 to, at;\n mapa.shared::cluster.u32 to, %0, %2;\n mapa.shared::cluster.u32 at, %1, %2;\n"
                 " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [at];\n}"
                 : : "r"(word), "r"(bar), "r"(gmm_cluster_rank() ^ (gmm_cluster_size() - 1)), "r"(wrong) : "memory");
}

