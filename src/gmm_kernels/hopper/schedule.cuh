/* ..................................................................................... Work tiles of products ... */

/* The arithmetic of the tile scheduler of the Hopper products. Plain functions of host and device, without warp
   operations. The scheduler warp of a CTA calls them (scheduler.cuh, fp8_plan.cuh, body_*.cuh). A C or C++ compiler
   sees this part with GMM_KERNELS_SCHEDULE defined, and nothing else of this header.

   A work tile is the part of D that a CTA computes at once. A cluster tile is what a cluster computes at once: c work
   tiles, one per CTA; c, the size of clusters, is 1 or 2. Cluster tiles are numbered group after group; names say
   `work` for them. CTA b of a grid of B CTAs takes cluster tiles b / c, b / c + B / c, b / c + 2 B / c, ... work_ends
   says in which group a cluster tile lies; gmm_sm90_schedule_tile computes this CTA's work tile from the number of the
   cluster tile within the group. For wgrad of a skewed split the balanced order below replaces that order.

   In a group with an odd number of work tiles the last one is unpaired. The two CTAs of a cluster must pass as many
   stages as each other. In wgrad these depend on the group, so that the other CTA has no tile. In forward and dgrad the
   unpaired tiles of two groups make one cluster tile, the last one of the second group; if the number of all tiles is
   odd, the last unpaired one remains, and is the last cluster tile of the last group. So work_ends[g] is there half the
   number of work tiles before group g, rounded down, and work_ends[G] half of all, rounded up. */
#endif
#if !defined(GMM__SCHEDULE_DONE) && \
    (defined(GMM_KERNELS_SCHEDULE) || (defined(GMM_IMPLEMENTATION) && defined(__CUDACC__)))
#define GMM__SCHEDULE_DONE

/* The operand that the two work tiles of a cluster have in common, and that TMA multicasts. */
enum { GMM_SM90_MULTICAST_NONE, GMM_SM90_MULTICAST_B, GMM_SM90_MULTICAST_A };

/* A work tile. */
typedef struct gmm_sm90_tile {
    int32_t g, k;        /* group; length of the contraction */
    int32_t row, end;    /* the group's rows in the token matrices: [row, end) */
    int32_t m0, n0;      /* first row (within the group) and first column of D */
    int32_t rows, cols;  /* rows and columns that exist; cols <= 0: no tile, its stages pass the pipeline unloaded */
    int32_t row_blocks;  /* blocks of rows that are multiplied: 16 rows each, FP8 64; 0 ends the ring */
    int32_t multicast;   /* GMM_SM90_MULTICAST_* */
} gmm_sm90_tile;

#ifndef __CUDACC__
/* What the functions below read of a product's arguments (common/epilogue.cuh): extents of D and of the contraction;
   the one that varies between groups is not read. */
typedef struct gmm_gemm_args {
    int32_t groups, m, n, k;
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
   cluster takes the same number of cluster tiles of a group, its rounds, so that all clusters stay at the same rows. In
   the second pass the cluster tiles that are left of a group, its rest, are given to the clusters with the least load
   so far, one each. A group of 70 cluster tiles has one round and a rest of 4 for 66 clusters. The struct lies where
   work_ends lies otherwise. */
enum { GMM_SM90_BALANCE_GROUPS = 256, GMM_SM90_BALANCE_CLUSTERS = 96 };
typedef struct gmm_sm90_balance {
    int32_t load[GMM_SM90_BALANCE_CLUSTERS];       /* length of the rests that each cluster has been given */
    unsigned char order[GMM_SM90_BALANCE_GROUPS];  /* groups, the longest first, equal ones by number */
    int32_t rounds;   /* cluster tiles of a group that each cluster takes in the first pass */
    int32_t rest;     /* cluster tiles of a group that are left for the second pass */
    int32_t min_load; /* least load of a tile, in stages: the time that D takes */
    int32_t cluster, clusters; /* number of this cluster, and how many there are */
    int32_t position; /* of the group at hand: 0 to G - 1 in the first pass, G to 2 G - 1 in the second; -1: none yet */
    int32_t first;    /* number of this cluster's first cluster tile there */
    int32_t count;    /* its cluster tiles in that group; while a rest is given out, those of the rest */
    int32_t below;    /* second pass: clusters with less load */
} gmm_sm90_balance;

/* What the scheduler warp of a CTA knows. Tiles hold at most `max_blocks` blocks of `block_rows` rows, begin at
   multiples of `row_align` rows and `col_align` columns, and cover the columns of D in `tiles_n` tiles. */
typedef struct gmm_sm90_scheduler {
    const gmm_gemm_args *p;
    int32_t *ends;          /* [G + 1] ends of the groups' rows */
    int32_t *work_ends;     /* [G + 1] cluster tiles before the groups, and all (gmm_sm90_count_work) */
    int32_t *padded_starts; /* [G + 1] where groups start in padded copies; FP8 products alone */
    int k_grouped;          /* wgrad: the rows of a group are the contraction */
    int cluster_along_n;    /* the CTAs of a cluster take neighbouring column tiles of the same rows, else neighbouring
                               row tiles of the same columns (gmm_sm90_schedule_tile) */
    int32_t tiles_n, max_blocks; /* 0 before the split has been planned; FP8: of the first tile before */
    int32_t odd_tiles;      /* forward, dgrad with clusters of two: whether the number of all work tiles is odd */
    int32_t g;              /* group in which the search for the next tile begins */
    int32_t balanced;       /* wgrad in the balanced order: a gmm_sm90_balance lies in work_ends */
    int32_t block_rows, row_align, col_align;
} gmm_sm90_scheduler;

/* Size of a CTA's cluster, and the CTA's number in it. Callers pass gmm_sm90_this_cta(), which reads special registers,
   so that no general register holds the two between calls. */
typedef struct gmm_sm90_cta {
    int32_t cluster_size, cta_rank;
} gmm_sm90_cta;

/* a / b for a >= 0 and b > 0: an unsigned division takes fewer instructions. */
GMM__HD int32_t gmm_sm90_divide(int32_t a, int32_t b) { return (int32_t)((uint32_t)a / (uint32_t)b); }

/* The cluster tile that a cluster takes as its `index`-th, counted from 0. stride: clusters of the grid. A shift
   divides by cluster_size, which is 1 or 2. */
GMM__HD int32_t gmm_sm90_work_number(uint32_t block, uint32_t cluster_size, uint32_t index, int32_t stride) {
    return (int32_t)((block >> (cluster_size - 1)) + index * (uint32_t)stride);
}

/* The number of tiles of at most `max_blocks` blocks of `block_rows` rows that cover `rows` rows. */
GMM__HD int32_t gmm_sm90_tile_count(int32_t rows, int32_t block_rows, int32_t max_blocks) {
    return gmm_sm90_divide(gmm_sm90_divide(rows + block_rows - 1, block_rows) + max_blocks - 1, max_blocks);
}

/* Stages of a tile. An empty contraction takes one stage of zeros, which the ragged maps deliver. */
GMM__HD uint32_t gmm_sm90_k_tiles(int32_t k) { return k > 0 ? (uint32_t)(k + 63) / 64 : 1; }

/* Row tiles of group g. */
GMM__HD int32_t gmm_sm90_row_tiles(const gmm_sm90_scheduler *s, int32_t g) {
    return gmm_sm90_tile_count(s->k_grouped ? s->p->m : s->ends[g + 1] - s->ends[g], s->block_rows, s->max_blocks);
}
/* Work tiles of group g; in wgrad rounded up to whole cluster tiles. */
GMM__HD int32_t gmm_sm90_group_tiles(const gmm_sm90_scheduler *s, int32_t g, int32_t cluster_size) {
    const int32_t tiles = gmm_sm90_row_tiles(s, g) * s->tiles_n;
    return s->k_grouped ? (tiles + cluster_size - 1) & -cluster_size : tiles;
}

/* Tiles along the columns of D where each of `nonempty` groups fits one tile of rows: at least `min_tiles`, and as many
   more, up to `max_tiles`, as fill the last round of a grid of `grid` CTAs. Unless loads of weights bound the product
   (loads_bound), no more than the width of the widest tile demands: narrower ones beside it would load rows once more
   and save no time. nonempty > 0. */
GMM__HD int32_t gmm_sm90_filling_tiles(int32_t nonempty, int32_t min_tiles, int32_t max_tiles, int32_t grid,
                                       int32_t cluster_size, int loads_bound) {
    /* rounded down to a multiple of the cluster size */
    const int32_t filling = gmm_sm90_divide(gmm_sm90_divide(nonempty * min_tiles + grid - 1, grid) * grid, nonempty) &
                            -cluster_size;
    const int32_t tiles = filling < min_tiles ? min_tiles : filling < max_tiles ? filling : max_tiles;
    const int32_t widest = gmm_sm90_divide(max_tiles + tiles - 1, tiles);
    return loads_bound ? tiles : gmm_sm90_divide(max_tiles + widest - 1, widest);
}
/* `tiles` tiles divide `count` units as evenly as possible: the first unit of tile i. */
GMM__HD int32_t gmm_sm90_even_begin(int32_t count, int32_t tiles, int32_t i) {
    const int32_t each = gmm_sm90_divide(count, tiles), rest = count - tiles * each;
    return i * each + (i < rest ? i : rest);
}

/* Whether the balanced order pays: the largest of `nonempty` groups has more than 5/4 of their mean, which is 1024 rows
   or more, so that the time of tiles depends on their rows. */
GMM__HD int gmm_sm90_is_skewed(int32_t rows, int32_t max_rows, int32_t nonempty) {
    return rows / 1024 >= nonempty && 4.0f * (float)max_rows * (float)nonempty > 5.0f * (float)rows;
}
/* Load of a tile of wgrad, in stages of 64 rows: products and what they do not hide, or the time of D if that is
   longer. FP8 counts in the same unit, although its stages have 128 rows. */
enum { GMM_SM90_OVERHEAD_STAGES = 2 }; /* per tile, for what its products do not hide */
GMM__HD int32_t gmm_sm90_tile_load(const gmm_sm90_balance *b, int32_t k) {
    const int32_t stages = (int32_t)gmm_sm90_k_tiles(k) + GMM_SM90_OVERHEAD_STAGES;
    return stages > b->min_load ? stages : b->min_load;
}
/* The position behind b->position; the first pass is left out where groups have no rounds. */
GMM__HD int32_t gmm_sm90_next_position(const gmm_sm90_balance *b, int32_t groups) {
    return b->position < 0 && b->rounds == 0 ? groups : b->position + 1;
}
/* The number within its group of the i-th cluster tile that this cluster takes there. groups: of the split. */
GMM__HD int32_t gmm_sm90_balanced_work(const gmm_sm90_balance *b, int32_t groups, int32_t i) {
    return b->position < groups ? i * b->clusters + b->cluster : b->rounds * b->clusters + b->below;
}

/* How the order of tiles differs from group to group, so that a CTA which got a large tile of one group gets a smaller
   one of the next. */
enum {
    GMM_SM90_ROTATE_TILES = 1, /* each group starts at another of its tiles (golden ratio) */
    GMM_SM90_ROTATE_ROWS = 2   /* each group has another row of tiles first in its columns; at most 8 rows */
};
/* The rotation of wgrad, whose tiles are nearly equal: only where a CTA would otherwise get the same tile of every
   group, or tiles of the same rows, of which the last ones may be lower. stride: clusters of the grid. group_work: 0 in
   the balanced order, where rows alone rotate. */
GMM__HD int gmm_sm90_wgrad_rotation(int32_t stride, int32_t group_work, int32_t tiles_m) {
    if (group_work > 0 && stride % group_work == 0) return GMM_SM90_ROTATE_TILES;
    return tiles_m <= 8 && stride % tiles_m == 0 ? GMM_SM90_ROTATE_ROWS : 0;
}

/* Fills in the work tile `t` of CTA `cta` in cluster tile `work` of group t->g; t->g becomes the group of an unpaired
   tile. group_work: cluster tiles of the group in wgrad. The two work tiles of a cluster have the same columns, and B
   is multicast, where tiles have 192 or 256 columns; with `cluster_along_n`, which is s->cluster_along_n (128 columns),
   they have the same rows, and A, the larger operand, is multicast. If the number of tiles along that axis is odd, the
   last ones are paired along the other axis. Rasterization within a group: along the rows first, in bands of 8
   clusters, so that tiles in flight read the same operands. */
GMM__HD void gmm_sm90_schedule_tile(const gmm_sm90_scheduler *s, int cluster_along_n, int32_t group_work, int32_t work,
                                    const int rotation, const gmm_sm90_cta cta, gmm_sm90_tile *t) {
    const gmm_gemm_args *p = s->p;
    const int32_t tiles_n = s->tiles_n, cluster_size = cta.cluster_size;
    int32_t cta_rank = cta.cta_rank, m, units, tiles_m = gmm_sm90_row_tiles(s, t->g), clusters_m, clusters_n, tm, tn;
    if (!s->k_grouped) group_work = tiles_m * tiles_n >> (cluster_size - 1); /* without an unpaired tile */
    if (!s->k_grouped && work == group_work) { /* unpaired tiles */
        const int remains = s->odd_tiles && t->g == p->groups - 1;
        if (!remains) { /* CTA 1 takes that of this group, CTA 0 that of the group before with an odd number */
            t->g -= !cta_rank;
            cta_rank = 0;
        }
        while (!((tiles_m = gmm_sm90_row_tiles(s, t->g)) * tiles_n & 1)) t->g--;
        work = tiles_m * tiles_n >> 1;
    } else if (rotation == GMM_SM90_ROTATE_TILES) {
        work += (int32_t)gmm_sm90_umulhi((uint32_t)t->g * 2654435769u, (uint32_t)group_work);
        if (work >= group_work) work -= group_work;
    }
    t->row = s->ends[t->g];
    t->end = s->ends[t->g + 1];
    m = s->k_grouped ? p->m : t->end - t->row;
    t->k = s->k_grouped ? t->end - t->row : p->k;
    clusters_m = cluster_along_n ? tiles_m : tiles_m >> (cluster_size - 1);
    clusters_n = cluster_along_n ? tiles_n >> (cluster_size - 1) : tiles_n;
    t->multicast = cluster_size == 1 ? GMM_SM90_MULTICAST_NONE
                   : cluster_along_n ? GMM_SM90_MULTICAST_A : GMM_SM90_MULTICAST_B;
    if (work < clusters_m * clusters_n) {
        const int32_t band = clusters_m > 8 ? gmm_sm90_divide(work, 8 * clusters_n) : 0;
        const int32_t rows_of_clusters = clusters_m - 8 * band;
        const int32_t height = rows_of_clusters < 8 ? rows_of_clusters : 8;
        work -= 8 * band * clusters_n;
        tn = gmm_sm90_divide(work, height);
        work -= tn * height;
        if (s->k_grouped && rotation == GMM_SM90_ROTATE_ROWS) work = (work + t->g) % height;
        tm = 8 * band + work;
        if (cluster_along_n) tn = tn * cluster_size + cta_rank;
        else tm = tm * cluster_size + cta_rank;
    } else { /* the last tiles of an odd number along this axis: two neighbours along the other axis */
        work = 2 * (work - clusters_m * clusters_n);
        /* the neighbours have the other operand in common */
        t->multicast = work + 1 < (cluster_along_n ? tiles_m : tiles_n)
                     ? GMM_SM90_MULTICAST_A + GMM_SM90_MULTICAST_B - t->multicast : GMM_SM90_MULTICAST_NONE;
        tm = cluster_along_n ? work + cta_rank : tiles_m - 1;
        tn = cluster_along_n ? tiles_n - 1 : work + cta_rank;
        /* The CTA beside an unpaired tile that no other joins has no tile: its column tile lies beyond the last one, so
           that cols <= 0. Along the columns, tn is that already. */
        if (tm >= tiles_m) {
            tm = tiles_m - 1;
            tn = tiles_n;
        }
    }
    units = gmm_sm90_divide(m + s->row_align - 1, s->row_align);
    t->m0 = s->row_align * gmm_sm90_even_begin(units, tiles_m, tm);
    t->rows = s->row_align * gmm_sm90_even_begin(units, tiles_m, tm + 1) - t->m0;
    if (t->rows > m - t->m0) t->rows = m - t->m0;
    t->row_blocks = gmm_sm90_divide(t->rows + s->block_rows - 1, s->block_rows);
    units = gmm_sm90_divide(p->n + s->col_align - 1, s->col_align);
    t->n0 = s->col_align * gmm_sm90_even_begin(units, tiles_n, tn);
    t->cols = s->col_align * gmm_sm90_even_begin(units, tiles_n, tn + 1) - t->n0;
    if (t->cols > p->n - t->n0) t->cols = p->n - t->n0;
}
#endif /* GMM__SCHEDULE_DONE */
#if defined(GMM__GEMM_DONE) && !defined(GMM__GEMM_REST_DONE) /* what follows is of the kernels again */
#define GMM__GEMM_REST_DONE
