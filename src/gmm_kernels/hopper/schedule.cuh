/* ..................................................................................... Work tiles of products ... */

/* The arithmetic of the tile scheduler of the Hopper products: which work a group has, and which tile a number of work
   is. Plain functions of host and device, without warp operations. scheduler.cuh and fp8.cuh call them from the
   scheduler warp of a CTA. A C or C++ compiler sees this part with GMM_KERNELS_SCHEDULE defined, and nothing else of
   this header.

   CTA b of a grid of B in clusters of c takes work numbers b / c, b / c + B / c, b / c + 2 B / c, ..., each of which is
   c tiles, one per CTA of the cluster. work_ends, the prefix sums of gmm_sm90_group_work over the groups, say which
   group a number lies in; gmm_sm90_schedule_tile says which tile of the group. For wgrad of a skewed split the balanced
   order below replaces that order of work. */
#endif
#if !defined(GMM__SCHEDULE_DONE) && \
    (defined(GMM_KERNELS_SCHEDULE) || (defined(GMM_IMPLEMENTATION) && defined(__CUDACC__)))
#define GMM__SCHEDULE_DONE

/* A work tile. */
typedef struct gmm_sm90_tile {
    int32_t g, k;        /* group; length of the contraction */
    int32_t row, end;    /* the group's rows in the token matrices: [row, end) */
    int32_t m0, n0;      /* first row (within the group) and first column of D */
    int32_t rows, cols;  /* rows and columns that exist; cols <= 0: no tile, its stages pass the pipeline unloaded */
    int32_t row_blocks;  /* blocks of rows that are multiplied: 16 rows each, FP8 64; 0 ends the ring */
    int32_t multicast;   /* operand shared with the other CTA's tile: 0 none, 1 B, 2 A */
} gmm_sm90_tile;

#ifndef __CUDACC__
/* What the functions below read of a product's arguments (mma/gemm.cuh): extents of D and of the contraction; the one
   that varies between groups is not read. */
typedef struct gmm_gemm_args {
    int32_t m, n, k;
} gmm_gemm_args;
#endif

/* The upper 32 bits of a product. */
GMM__HD uint32_t gmm_sm90_umulhi(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __umulhi(a, b);
#else
    return (uint32_t)((uint64_t)a * b >> 32);
#endif
}

/* The balanced order of wgrad, whose tiles take as long as their group has rows. In the order of groups some clusters
   would get more long tiles than others. Besides, clusters that are at distant rows of the same group do not find each
   other's operands in the L2. So the scheduler passes twice over the groups, the longest first. In the first pass every
   cluster takes the same number of works of a group, its rounds, so that all clusters stay at the same rows. In the
   second pass the works that are left of a group, its rest, are given to the clusters with the least load so far, one
   each. A group of 70 works has one round and a rest of 4 for 66 clusters. The struct lies where work_ends lies
   otherwise. */
enum { GMM_SM90_BALANCE_GROUPS = 256, GMM_SM90_BALANCE_CLUSTERS = 96 };
typedef struct gmm_sm90_balance {
    int32_t load[GMM_SM90_BALANCE_CLUSTERS];       /* length of the rests that each cluster has been given */
    unsigned char order[GMM_SM90_BALANCE_GROUPS];  /* groups, the longest first, equal ones by number */
    int32_t rounds, rest, least;                   /* of each group; least load of a tile: the time that D takes */
    int32_t cluster, clusters;                     /* number of this cluster, and how many there are */
    int32_t position; /* of the group at hand: 0 to G - 1 in the first pass, G to 2 G - 1 in the second; -1: none yet */
    int32_t first;    /* number of this cluster's first work there */
    int32_t count;    /* this cluster's works there; while a rest is given out, those of the rest */
    int32_t below;    /* second pass: clusters with less load */
} gmm_sm90_balance;

/* What the scheduler warp of a CTA knows. Tiles hold at most `max_blocks` blocks of `block_rows` rows, begin at
   multiples of `row_align` rows and `col_align` columns, and cover the columns of D in `tiles_n` tiles. */
typedef struct gmm_sm90_scheduler {
    const gmm_gemm_args *p;
    int32_t *ends;          /* [G + 1] ends of the groups' rows */
    int32_t *work_ends;     /* [G + 1] prefix sums of the groups' work (gmm_sm90_count_work) */
    int32_t *padded_starts; /* [G + 1] where groups start in padded copies; FP8 products alone */
    int k_grouped;          /* wgrad: the rows of a group are the contraction */
    int raster_n;           /* rasterization along N: clusters take tiles of the same rows (gmm_sm90_group_work) */
    int32_t tiles_n, max_blocks;
    int32_t g;              /* group in which the search for the next tile begins */
    int32_t balanced;       /* wgrad in the balanced order: a gmm_sm90_balance lies in work_ends */
    int32_t block_rows, row_align, col_align;
} gmm_sm90_scheduler;

/* Size of a CTA's cluster, and the CTA's number in it. Callers pass gmm_sm90_this_cta(), which reads special registers,
   so that no general register holds the two between calls. */
typedef struct gmm_sm90_cta {
    int32_t cluster_size, cta_rank;
} gmm_sm90_cta;

/* The work number that a cluster takes as its `index`-th, counted from 0. stride: clusters of the grid. */
GMM__HD int32_t gmm_sm90_work_number(uint32_t block, uint32_t cluster_size, uint32_t index, int32_t stride) {
    return (int32_t)(block / cluster_size + index * (uint32_t)stride);
}

/* The number of tiles of at most `max_blocks` blocks of `block_rows` rows that cover `rows` rows. */
GMM__HD int32_t gmm_sm90_tile_count(int32_t rows, int32_t block_rows, int32_t max_blocks) {
    return ((rows + block_rows - 1) / block_rows + max_blocks - 1) / max_blocks;
}

/* Stages of a tile. An empty contraction takes one stage of zeros, which the ragged maps deliver. */
GMM__HD uint32_t gmm_sm90_k_tiles(int32_t k) { return k > 0 ? (uint32_t)(k + 63) / 64 : 1; }

/* Work of a group, counted in clusters: a cluster of two CTAs computes two tiles at once. Two wide tiles (256 columns)
   have the same columns, and B is multicast; with `raster_n` (128 columns) they have the same rows, and A, the larger
   operand, is multicast. Where the number of tiles along that axis is odd, the last tiles are paired along the other
   axis. */
GMM__HD int32_t gmm_sm90_group_work(int32_t tiles_m, int32_t tiles_n, int32_t cluster_size, int raster_n) {
    const int32_t along = raster_n ? tiles_n : tiles_m, other = raster_n ? tiles_m : tiles_n;
    return cluster_size == 1 ? tiles_m * tiles_n : along / 2 * other + along % 2 * ((other + 1) / 2);
}

/* Tiles along the columns of D where each of `nonempty` groups fits one tile of rows: at least `min_tiles`, and as many
   more, up to `max_tiles`, as fill the last round of a grid of `grid` CTAs. */
GMM__HD int32_t gmm_sm90_filling_tiles(int32_t nonempty, int32_t min_tiles, int32_t max_tiles, int32_t grid,
                                       int32_t cluster_size) {
    const int32_t filling = (nonempty * min_tiles + grid - 1) / grid * grid / nonempty & -cluster_size;
    return filling < min_tiles ? min_tiles : filling < max_tiles ? filling : max_tiles;
}
/* `tiles` tiles divide `count` units as evenly as possible: the first unit of tile i. */
GMM__HD int32_t gmm_sm90_even_begin(int32_t count, int32_t tiles, int32_t i) {
    const int32_t each = count / tiles, rest = count - tiles * each;
    return i * each + (i < rest ? i : rest);
}

/* Whether the balanced order pays: the largest of `nonempty` groups has more than 5/4 of their mean, which is 1024 rows
   or more, so that the time of tiles depends on their rows. */
GMM__HD int gmm_sm90_is_skewed(int32_t rows, int32_t max_rows, int32_t nonempty) {
    return rows / 1024 >= nonempty && 4.0f * (float)max_rows * (float)nonempty > 5.0f * (float)rows;
}
/* Load of a tile of wgrad, in stages of 64 rows: products and what they do not hide, or the time of D if that is
   longer. FP8 counts in the same unit, although its stages have 128 rows. */
GMM__HD int32_t gmm_sm90_tile_load(const gmm_sm90_balance *b, int32_t k) {
    const int32_t stages = (int32_t)gmm_sm90_k_tiles(k) + 2;
    return stages > b->least ? stages : b->least;
}
/* The position behind b->position; the first pass is left out where groups have no rounds. */
GMM__HD int32_t gmm_sm90_next_position(const gmm_sm90_balance *b, int32_t groups) {
    return b->position < 0 && b->rounds == 0 ? groups : b->position + 1;
}
/* The number within its group of the i-th work that this cluster takes there. groups: of the split. */
GMM__HD int32_t gmm_sm90_balanced_work(const gmm_sm90_balance *b, int32_t groups, int32_t i) {
    return b->position < groups ? i * b->clusters + b->cluster : b->rounds * b->clusters + b->below;
}

/* Fills in the tile `t` that CTA `cta` computes of work number `work` in group t->g, which has `group_work`.
   Rasterization within a group: along the rows first, in bands of 8 clusters, so that tiles in flight read the same
   operands. raster_n: as s->raster_n. `rotated`: each group starts at another of its tiles (golden ratio), so that a
   CTA which got a wide tile of one group gets a narrow one of the next. wgrad, whose tiles are nearly equal, rotates
   only where a CTA would otherwise get the same tile of every group. */
GMM__HD void gmm_sm90_schedule_tile(const gmm_sm90_scheduler *s, int raster_n, int32_t group_work, int32_t work,
                                    const int rotated, const gmm_sm90_cta cta, gmm_sm90_tile *t) {
    const gmm_gemm_args *p = s->p;
    const int32_t tiles_n = s->tiles_n, cluster_size = cta.cluster_size, cta_rank = cta.cta_rank;
    int32_t m, units, tiles_m, clusters_m, clusters_n, tm, tn;
    t->row = s->ends[t->g];
    t->end = s->ends[t->g + 1];
    m = s->k_grouped ? p->m : t->end - t->row;
    t->k = s->k_grouped ? t->end - t->row : p->k;
    if (rotated) {
        work += (int32_t)gmm_sm90_umulhi((uint32_t)t->g * 2654435769u, (uint32_t)group_work);
        if (work >= group_work) work -= group_work;
    }
    tiles_m = gmm_sm90_tile_count(m, s->block_rows, s->max_blocks);
    clusters_m = raster_n ? tiles_m : tiles_m >> (cluster_size - 1);
    clusters_n = raster_n ? tiles_n >> (cluster_size - 1) : tiles_n;
    t->multicast = cluster_size == 1 ? 0 : raster_n ? 2 : 1;
    if (work < clusters_m * clusters_n) {
        const int32_t band = clusters_m > 8 ? work / (8 * clusters_n) : 0, rows_of_clusters = clusters_m - 8 * band;
        const int32_t height = rows_of_clusters < 8 ? rows_of_clusters : 8;
        work -= 8 * band * clusters_n;
        tn = work / height;
        tm = 8 * band + work - tn * height;
        if (raster_n) tn = tn * cluster_size + cta_rank;
        else tm = tm * cluster_size + cta_rank;
    } else { /* the last tiles of an odd number along this axis: two neighbours along the other axis */
        work = 2 * (work - clusters_m * clusters_n);
        t->multicast = work + 1 < (raster_n ? tiles_m : tiles_n) ? 3 - t->multicast : 0;
        tm = raster_n ? work + cta_rank : tiles_m - 1;
        tn = raster_n ? tiles_n - 1 : work + cta_rank;
        if (tm >= tiles_m) {
            tm = tiles_m - 1;
            tn = tiles_n;
        }
    }
    units = (m + s->row_align - 1) / s->row_align;
    t->m0 = s->row_align * gmm_sm90_even_begin(units, tiles_m, tm);
    t->rows = s->row_align * gmm_sm90_even_begin(units, tiles_m, tm + 1) - t->m0;
    if (t->rows > m - t->m0) t->rows = m - t->m0;
    t->row_blocks = (t->rows + s->block_rows - 1) / s->block_rows;
    units = (p->n + s->col_align - 1) / s->col_align;
    t->n0 = s->col_align * gmm_sm90_even_begin(units, tiles_n, tn);
    t->cols = s->col_align * gmm_sm90_even_begin(units, tiles_n, tn + 1) - t->n0;
    if (t->cols > p->n - t->n0) t->cols = p->n - t->n0;
}

#ifndef __CUDACC__
/* The specification in sequence, for hosts: what the scheduler warps compute with a group per lane
   (gmm_sm90_count_work, gmm_find_group32). rotation: 0 never, 1 always, 2 where a CTA would otherwise get the same
   tile of every group. */
GMM__HD void gmm_sm90_sum_work(const gmm_sm90_scheduler *s, int32_t groups, int32_t cluster_size) {
    int32_t g;
    for (g = s->work_ends[0] = 0; g < groups; g++) {
        const int32_t m = s->k_grouped ? s->p->m : s->ends[g + 1] - s->ends[g];
        s->work_ends[g + 1] = s->work_ends[g] + gmm_sm90_group_work(gmm_sm90_tile_count(m, s->block_rows,
                              s->max_blocks), s->tiles_n, cluster_size, s->raster_n);
    }
}
/* The tile that CTA `block` of `grid` takes as its `index`-th. Returns 0 behind the last. */
GMM__HD int gmm_sm90_nth_tile(const gmm_sm90_scheduler *s, int32_t groups, uint32_t block, uint32_t grid,
                              int32_t cluster_size, int rotation, uint32_t index, gmm_sm90_tile *t) {
    const int32_t stride = (int32_t)(grid / (uint32_t)cluster_size);
    const int32_t work = gmm_sm90_work_number(block, (uint32_t)cluster_size, index, stride);
    int32_t group_work;
    gmm_sm90_cta cta;
    if (work >= s->work_ends[groups]) return 0;
    cta.cluster_size = cluster_size;
    cta.cta_rank = (int32_t)(block % (uint32_t)cluster_size);
    t->g = 0;
    while (s->work_ends[t->g + 1] <= work) t->g++;
    group_work = s->work_ends[t->g + 1] - s->work_ends[t->g];
    if (rotation == 2) rotation = stride % group_work == 0;
    gmm_sm90_schedule_tile(s, s->raster_n, group_work, work - s->work_ends[t->g], rotation, cta, t);
    return 1;
}
/* The balanced order in sequence: begins it for a cluster. */
GMM__HD void gmm_sm90_begin_balance(gmm_sm90_balance *b, const int32_t *ends, int32_t groups, int32_t work,
                                    int32_t cluster, int32_t clusters) {
    int32_t g, i, index;
    for (i = 0; i < clusters; i++) b->load[i] = 0;
    b->rounds = work / clusters;
    b->rest = work % clusters;
    b->cluster = cluster;
    b->clusters = clusters;
    b->position = -1;
    b->least = b->first = b->count = b->below = 0;
    for (g = 0; g < groups; g++) {
        const int32_t k = ends[g + 1] - ends[g];
        for (i = index = 0; i < g; i++) index += ends[i + 1] - ends[i] >= k;
        for (; i < groups; i++) index += ends[i + 1] - ends[i] > k;
        b->order[index] = (unsigned char)g;
    }
}
/* Gives the `rest` of a group, tiles of load `load`, to the clusters with the least load, one each. */
GMM__HD void gmm_sm90_assign_rest(gmm_sm90_balance *b, int32_t rest, int32_t load) {
    const int32_t clusters = b->clusters;
    int32_t before[GMM_SM90_BALANCE_CLUSTERS], c, i, below;
    for (c = 0; c < clusters; c++) before[c] = b->load[c];
    for (c = 0; c < clusters; c++) {
        const int32_t own = before[c];
        for (i = below = 0; i < c; i++) below += before[i] <= own;
        for (; i < clusters; i++) below += before[i] < own;
        if (below < rest) b->load[c] += load;
        if (c == b->cluster) b->below = below, b->count = below < rest;
    }
}
/* The group of a cluster's work number `index`, and the number within it. Returns 0 behind the last. `index` does not
   fall from call to call. */
GMM__HD int gmm_sm90_balanced_tile(gmm_sm90_balance *b, const int32_t *ends, int32_t groups, int32_t index, int32_t *g,
                                   int32_t *work) {
    while (index >= b->first + b->count) {
        const int32_t position = gmm_sm90_next_position(b, groups);
        if (position >= 2 * groups) return 0;
        b->first += b->count;
        b->position = position;
        *g = b->order[b->position % groups];
        b->count = b->rounds;
        if (b->position >= groups) gmm_sm90_assign_rest(b, b->rest, gmm_sm90_tile_load(b, ends[*g + 1] - ends[*g]));
    }
    *g = b->order[b->position % groups];
    *work = gmm_sm90_balanced_work(b, groups, index - b->first);
    return 1;
}
#endif
#endif /* GMM__SCHEDULE_DONE */
#if defined(GMM__GEMM_DONE) && !defined(GMM__GEMM_REST_DONE) /* what follows is of the kernels again */
#define GMM__GEMM_REST_DONE
