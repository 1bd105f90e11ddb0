/* ................................................................. Grouped FP8 products: planning of work tiles ... */

/* Stages of a tile. An empty contraction takes one stage without a load: a tile has at least one stage, because stages
   bound how far the producer, and with it the scheduler, is ahead of the consumers. */
GMM__DEVICE uint32_t gmm_fp8_k_tiles(int32_t k) { return k > 0 ? (uint32_t)(k + 127) / 128 : 1; }

/* Clocks of a stage of a tile with `blocks` blocks of 64 rows. Host (gmm__wgmma_fp8_cost) and device choose tiles by
   them. Fitted on one H200 to 500 products by blocks in forward, even and skewed, each in both tiles. */
GMM__HD int32_t gmm_fp8_stage_clocks(int32_t tile_n, int32_t blocks) {
    if (tile_n == 128) return blocks == 1 ? 640 : blocks == 2 ? 830 : 920;
    return blocks == 1 ? 890 : 970;
}
/* The same, summed over the tiles of a group, which divide its blocks evenly: `lower` tiles of `blocks` blocks, and
   `higher` ones of one more. blocks > 0. */
GMM__HD float gmm_fp8_group_clocks(int32_t tile_n, int32_t blocks, float lower, float higher) {
    return lower * (float)gmm_fp8_stage_clocks(tile_n, blocks) +
           higher * (float)gmm_fp8_stage_clocks(tile_n, blocks + 1);
}
enum { GMM_FP8_TILE_CLOCKS = 2000 }; /* what a tile takes besides its stages */

/* The price of fwd or dgrad of the split in a tile of `consumers` blocks of rows and tile_n columns: the rounds of the
   busiest CTA times the clocks of a mean tile. Whole warp. */
GMM__DEVICE float gmm_fp8_tile_price(const gmm_sm90_scheduler *s, gmm_sm90_split_stats stats, const int32_t consumers,
                                     const int32_t tile_n) {
    const int32_t grid = (int32_t)gridDim.x, min_tiles = (s->p->n + tile_n - 1) / tile_n;
    const int32_t tiles_n = tile_n == 128 ? min_tiles
                                          : gmm_sm90_tiles_n(s->p, min_tiles, 64, GMM_FP8_BLOCK_ROWS * consumers,
                                                             (int32_t)gmm_cluster_nctarank(), stats);
    int32_t tiles = 0, g; /* row tiles */
    float clocks = 0.0f;  /* of a stage, summed over row tiles */
#pragma unroll 1
    for (g = (int32_t)threadIdx.x & 31; (g & ~31) < s->p->groups; g += 32) {
        const int32_t rows = g < s->p->groups ? s->ends[g + 1] - s->ends[g] : 0;
        const int32_t blocks = (rows + GMM_FP8_BLOCK_ROWS - 1) / GMM_FP8_BLOCK_ROWS;
        const int32_t tiles_m = (blocks + consumers - 1) / consumers;
        tiles += tiles_m;
        if (tiles_m > 0)
            clocks += gmm_fp8_group_clocks(tile_n, blocks / tiles_m, (float)(tiles_m - blocks % tiles_m),
                                           (float)(blocks % tiles_m));
    }
    tiles = __reduce_add_sync(0xFFFFFFFFu, tiles);
#pragma unroll
    for (g = 16; g > 0; g /= 2) clocks += __shfl_xor_sync(0xFFFFFFFFu, clocks, g);
    return (float)((tiles * tiles_n + grid - 1) / grid) *
           ((float)gmm_fp8_k_tiles(s->p->k) * clocks / (float)max(tiles, 1) + (float)GMM_FP8_TILE_CLOCKS);
}

/* Prefix sums [G + 1] of the groups' rows in padded copies. Whole warp. */
GMM__DEVICE void gmm_fp8_padded_starts(int32_t groups, const int32_t *ends, int32_t *starts) {
    const int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t rows_before = 0, g;
    if (lane == 0) starts[0] = 0;
#pragma unroll 1
    for (g = lane; (g & ~31) < groups; g += 32) {
        const int32_t rows = g < groups ? ends[g + 1] - ends[g] : 0;
        const int32_t padded = (rows + GMM_GROUP_ROWS - 1) / GMM_GROUP_ROWS * GMM_GROUP_ROWS;
        const int32_t end = rows_before + gmm_sm90_lane_sum(padded);
        if (g < groups) starts[g + 1] = end;
        rows_before = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    __syncwarp();
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

/* Rules of FP8 tiles. The store warp reads entry n of the ring until it gives consumers the slot for tile n + 1, and
   consumers read it until they have stored tile n. By then they may have released all stages of tile n + 1, so that the
   producer has begun tile n + 2 + stages at most. The scheduler overwrites the entry when the producer has begun tile
   n + GMM_SM90_TILE_RING / 2. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert((stages_) + 3 <= GMM_SM90_TILE_RING / 2, "tile " #tag ": the ring is too short for its stages"); \
    static_assert(128 * ((consumers_) * (consumer_regs_) + (others_)) <= 65536 && (consumer_regs_) % 8 == 0 && \
                  (others_) % 8 == 0, "tile " #tag ": a multiprocessor has 65536 registers"); \
    static_assert((consumers_) * (boxes_) <= 32, "tile " #tag ": a lane of the store warp stores one box");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert(!(glu_) || ((tile_n_) == 128 && (boxes_) == 2 && !(lines_)), \
                  "tile " #tag ": a glu tile has the columns of a 1x128 scale, and the gate fills a store slot");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X

/* The predicted first tile of this CTA. Its operands are not multicast, since the CTAs of a cluster may have read
   different splits. Whole warp. */
GMM__DEVICE void gmm_fp8_predict_first_tile(const gmm_fp8_args *args, const gmm_sm90_scheduler *s,
                                            const gmm_sm90_cta cta, gmm_fp8_tile *f) {
    const int32_t *const ends = s->ends, *const work_ends = s->work_ends;
    int32_t work = (int32_t)(blockIdx.x >> (cta.cluster_size - 1)), g = 0, m;
    gmm_fp8_empty_tile(args, f);
    if (work >= work_ends[args->p.groups]) return;
    gmm_find_group32(work_ends, args->p.groups, work, &g);
    work -= work_ends[g];
    f->t.g = g;
    m = ends[g + 1] - ends[g];
    /* What gmm_sm90_schedule_tile computes, with less arithmetic, where the group has one tile of rows. The last column
       tile of an odd number is unpaired, and is left to that function. */
    if (m > 0 && m <= s->block_rows * s->max_blocks && work < s->tiles_n >> (cta.cluster_size - 1)) {
        const int32_t tn = cta.cluster_size * work + cta.cta_rank;
        const int32_t units = gmm_sm90_divide(args->p.n + s->col_align - 1, s->col_align);
        f->t.row = ends[g];
        f->t.end = ends[g + 1];
        f->t.rows = m;
        f->t.row_blocks = gmm_sm90_divide(m + s->block_rows - 1, s->block_rows);
        f->t.n0 = s->col_align * gmm_sm90_even_begin(units, s->tiles_n, tn);
        f->t.cols = s->col_align * gmm_sm90_even_begin(units, s->tiles_n, tn + 1) - f->t.n0;
        if (f->t.cols > args->p.n - f->t.n0) f->t.cols = args->p.n - f->t.n0;
    } else {
        gmm_sm90_schedule_tile(s, s->cluster_along_n, 0, work, 0, cta, &f->t);
        f->t.multicast = GMM_SM90_MULTICAST_NONE;
    }
    f->padded_row = s->padded_starts[f->t.g];
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

