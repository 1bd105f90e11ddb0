/* test_scheduler.c - the work tiles of the Hopper products: every element of D in one tile, in the promised order. */
#include "test.h"

#define GMM_KERNELS_SCHEDULE
#include "gmm_kernels.cuh"

#include <stdlib.h>
#include <string.h>

enum { MOST_GROUPS = 4096, MOST_ROWS = 1 << 16 };

/* What the scheduler warp of a CTA computes with a group per lane, in sequence. All groups have work, and D takes no
   time. First gmm_sm90_count_work: the cluster tiles before the groups. */
static void sum_work(gmm_sm90_scheduler *s, int32_t groups, int32_t cluster_size) {
    int32_t tiles = s->work_ends[0] = 0;
    for (int32_t g = 0; g < groups; g++) {
        tiles += gmm_sm90_group_tiles(s, g, cluster_size);
        s->work_ends[g + 1] = tiles / cluster_size;
    }
    s->odd_tiles = tiles % cluster_size;
    s->work_ends[groups] += s->odd_tiles;
}
/* The group with the n-th odd number of work tiles, -1 behind the last. */
static int32_t odd_group(const gmm_sm90_scheduler *s, int32_t groups, int32_t n) {
    for (int32_t g = 0; g < groups; g++)
        if (gmm_sm90_row_tiles(s, g) * s->tiles_n % 2 && n-- == 0) return g;
    return -1;
}
enum { AS_WGRAD = -1 }; /* rotation: what gmm_sm90_wgrad_rotation says */
/* The tile that CTA `block` of `grid` takes as its `index`-th. Returns 0 behind the last. */
static int nth_tile(const gmm_sm90_scheduler *s, int32_t groups, uint32_t block, uint32_t grid, int32_t cluster_size,
                    int rotation, uint32_t index, gmm_sm90_tile *t) {
    const int32_t stride = (int32_t)(grid / (uint32_t)cluster_size);
    const int32_t work = gmm_sm90_work_number(block, (uint32_t)cluster_size, index, stride);
    const gmm_sm90_cta cta = { cluster_size, (int32_t)(block % (uint32_t)cluster_size) };
    if (work >= s->work_ends[groups]) return 0;
    t->g = 0;
    while (s->work_ends[t->g + 1] <= work) t->g++;
    const int32_t group_work = s->work_ends[t->g + 1] - s->work_ends[t->g];
    if (rotation == AS_WGRAD)
        rotation = gmm_sm90_wgrad_rotation(stride, group_work,
                                           gmm_sm90_tile_count(s->p->m, s->block_rows, s->max_blocks));
    gmm_sm90_schedule_tile(s, s->cluster_along_n, group_work, work - s->work_ends[t->g], rotation, cta, t);
    return 1;
}
/* The balanced order: begins it for a cluster, as gmm_sm90_plan_balance does. */
static void begin_balance(gmm_sm90_balance *b, const int32_t *ends, int32_t groups, int32_t work, int32_t cluster,
                          int32_t clusters) {
    for (int32_t i = 0; i < clusters; i++) b->load[i] = 0;
    b->rounds = work / clusters;
    b->rest = work % clusters;
    b->cluster = cluster;
    b->clusters = clusters;
    b->position = -1;
    b->min_load = b->first = b->count = b->below = 0;
    for (int32_t g = 0; g < groups; g++) {
        const int32_t k = ends[g + 1] - ends[g];
        int32_t index = 0;
        for (int32_t i = 0; i < groups; i++) index += i < g ? ends[i + 1] - ends[i] >= k : ends[i + 1] - ends[i] > k;
        b->order[index] = (unsigned char)g;
    }
}
/* gmm_sm90_assign_rest: gives the `rest` of a group, tiles of load `load`, to the clusters with the least load, one
   each. */
static void assign_rest(gmm_sm90_balance *b, int32_t rest, int32_t load) {
    int32_t before[GMM_SM90_BALANCE_CLUSTERS];
    for (int32_t c = 0; c < b->clusters; c++) before[c] = b->load[c];
    for (int32_t c = 0; c < b->clusters; c++) {
        int32_t below = 0;
        for (int32_t i = 0; i < b->clusters; i++) below += i < c ? before[i] <= before[c] : before[i] < before[c];
        if (below < rest) b->load[c] += load;
        if (c == b->cluster) b->below = below, b->count = below < rest;
    }
}
/* gmm_sm90_balanced_tile: the group of a cluster's cluster tile number `index`, and the number within the group.
   Returns 0 behind the last. `index` does not fall from call to call. */
static int balanced_tile(gmm_sm90_balance *b, const int32_t *ends, int32_t groups, int32_t index, int32_t *g,
                         int32_t *work) {
    while (index >= b->first + b->count) {
        const int32_t position = gmm_sm90_next_position(b, groups);
        if (position >= 2 * groups) return 0;
        b->first += b->count;
        b->position = position;
        *g = b->order[b->position % groups];
        b->count = b->rounds;
        if (b->position >= groups) assign_rest(b, b->rest, gmm_sm90_tile_load(b, ends[*g + 1] - ends[*g]));
    }
    *g = b->order[b->position % groups];
    *work = gmm_sm90_balanced_work(b, groups, index - b->first);
    return 1;
}

/* Tiles as the kernels schedule them; rotation as in nth_tile. */
static const struct kind {
    const char *name;
    int32_t block_rows, max_blocks, row_align, col_align, tile_n;
    int cluster_along_n, k_grouped, rotation;
} kinds[] = {
    { "256x128", 16, 16, 8, 64, 128, 1, 0, 1 },        { "160x256", 16, 10, 8, 64, 256, 0, 0, 1 },
    { "96x256", 16, 6, 8, 64, 256, 0, 0, 1 },          { "176x128", 16, 11, 8, 64, 128, 1, 0, 1 },
    { "48x128", 16, 3, 8, 64, 128, 1, 0, 1 },          { "wgrad 192x128", 16, 12, 64, 128, 128, 1, 1, AS_WGRAD },
    { "wgrad 128x128", 16, 8, 64, 128, 128, 1, 1, AS_WGRAD }, { "fp8 192x128", 64, 3, 64, 128, 128, 1, 0, 0 },
    { "fp8 128x192", 64, 2, 64, 64, 192, 0, 0, 0 },    { "fp8 wgrad 192x128", 64, 3, 64, 128, 128, 1, 1, AS_WGRAD },
    { "fp8 wgrad 128x192", 64, 2, 64, 192, 192, 0, 1, AS_WGRAD },
};

/* Sizes of groups: X(name, rows of group g of G). */
#define SPLITS(X) \
    X(uniform, 200) \
    X(small, 1 + g % 9) \
    X(skewed, 3000 / (g + 1)) \
    X(empty, 0) \
    X(gaps, g % 3 ? 0 : 17 * g % 700) \
    X(hot, g == G / 2 ? 5000 : 0)
#define X(name, rows) \
    static int32_t split_##name(int32_t g, int32_t G) { \
        (void)g; \
        (void)G; \
        return rows; \
    }
SPLITS(X)
#undef X
static const struct {
    const char *name;
    int32_t (*rows)(int32_t g, int32_t G);
} splits[] = {
#define X(name, rows) { #name, split_##name },
    SPLITS(X)
#undef X
};

/* The first of part i where `count` units are divided into parts, the first ones a unit longer. */
static int32_t part_begin(int32_t count, int32_t parts, int32_t i) {
    int32_t begin = 0;
    for (int32_t j = 0; j < i; j++) begin += count / parts + (j < count % parts);
    return begin;
}
static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* A group's tiles in the promised order, as rows and columns of tiles, two entries per CTA of a cluster: bands of 8
   clusters along the rows, in a band column by column, each from row `row0` of the band on; then what an odd number of
   tiles leaves, along the other axis. Of an unpaired tile the second CTA has row -1. Returns the number of clusters,
   without that of an unpaired tile in forward and dgrad. */
static int32_t promised(const struct kind *k, int32_t tiles_m, int32_t tiles_n, int32_t cluster, int32_t row0,
                        int32_t (*order)[4]) {
    const int32_t clusters_m = k->cluster_along_n ? tiles_m : tiles_m / cluster;
    const int32_t clusters_n = k->cluster_along_n ? tiles_n / cluster : tiles_n;
    int32_t count = 0;
    for (int32_t band = 0; band < clusters_m; band += 8)
        for (int32_t n = 0; n < clusters_n; n++)
            for (int32_t i = 0; i < least(clusters_m - band, 8); i++, count++) {
                const int32_t m = band + (i + row0) % least(clusters_m - band, 8);
                order[count][0] = k->cluster_along_n ? m : m * cluster;
                order[count][1] = k->cluster_along_n ? n * cluster : n;
                order[count][2] = order[count][0] + (k->cluster_along_n ? 0 : cluster - 1);
                order[count][3] = order[count][1] + (k->cluster_along_n ? cluster - 1 : 0);
            }
    if (cluster == 2 && (k->cluster_along_n ? tiles_n : tiles_m) % 2)
        for (int32_t i = 0; i < (k->cluster_along_n ? tiles_m : tiles_n); i += 2, count++) {
            const int second = i + 1 < (k->cluster_along_n ? tiles_m : tiles_n);
            order[count][0] = k->cluster_along_n ? i : tiles_m - 1;
            order[count][1] = k->cluster_along_n ? tiles_n - 1 : i;
            order[count][2] = !second ? -1 : k->cluster_along_n ? i + 1 : tiles_m - 1;
            order[count][3] = !second ? -1 : k->cluster_along_n ? tiles_n - 1 : i + 1;
        }
    return count - (cluster == 2 && !k->k_grouped && tiles_m * tiles_n % 2);
}

/* The tile of one CTA: tile tm, tn of its group; tm is -1 where it has none. Marks the tile's cells, and returns how
   many they are. */
static int64_t check_tile(const struct kind *k, const gmm_sm90_scheduler *s, int32_t work, const gmm_sm90_tile *c,
                          int32_t tm, int32_t tn, unsigned char *seen, int64_t seen_size) {
    const int32_t rows = s->ends[c->g + 1] - s->ends[c->g], m = k->k_grouped ? s->p->m : rows, n = s->p->n;
    const int32_t tiles_m = ((m + k->block_rows - 1) / k->block_rows + k->max_blocks - 1) / k->max_blocks;
    const int32_t units_m = (m + k->row_align - 1) / k->row_align, units_n = (n + k->col_align - 1) / k->col_align;
    const int64_t row0 = k->k_grouped ? (int64_t)c->g * units_m : s->ends[c->g] / k->row_align + c->g;
    int64_t cells = 0;
    T_CHECK(c->row == s->ends[c->g] && c->end == s->ends[c->g + 1] && c->k == (k->k_grouped ? rows : s->p->k),
            "rows or k of work %d", (int)work);
    T_CHECK(c->row_blocks >= 1 && c->row_blocks <= k->max_blocks && c->rows <= k->block_rows * c->row_blocks,
            "work %d: %d blocks for %d rows", (int)work, (int)c->row_blocks, (int)c->rows);
    if (tm < 0) {
        T_CHECK(c->cols <= 0 && c->multicast == GMM_SM90_MULTICAST_NONE, "work %d: a tile behind the last", (int)work);
        return 0;
    }
    T_CHECK(c->m0 == k->row_align * part_begin(units_m, tiles_m, tm) &&
            c->n0 == k->col_align * part_begin(units_n, s->tiles_n, tn),
            "work %d: tile at %d, %d, not tile %d, %d", (int)work, (int)c->m0, (int)c->n0, (int)tm, (int)tn);
    T_CHECK(c->rows > 0 && c->m0 + c->rows <= m && c->cols > 0 && c->cols <= k->tile_n && c->n0 + c->cols <= n,
            "work %d: %d x %d at %d, %d", (int)work, (int)c->rows, (int)c->cols, (int)c->m0, (int)c->n0);
    for (int32_t i = c->m0 / k->row_align; i * k->row_align < c->m0 + c->rows; i++)
        for (int32_t j = c->n0 / k->col_align; j * k->col_align < c->n0 + c->cols; j++, cells++) {
            const int64_t cell = (row0 + i) * units_n + j;
            T_CHECK(cell < seen_size && !seen[cell], "work %d: twice", (int)work);
            seen[cell] = 1;
        }
    return cells;
}

/* One problem on one grid. */
static void check_tiles(const struct kind *k, const int32_t *ends, int32_t G, int32_t m_all, int32_t n, uint32_t grid,
                        int32_t cluster) {
    static int32_t work_ends[MOST_GROUPS + 1], shift[MOST_GROUPS], order[1 << 14][4];
    static unsigned char seen[1 << 20];
    const gmm_gemm_args extents = { G, m_all, n, 777 };
    const int32_t units_n = (n + k->col_align - 1) / k->col_align;
    int32_t max_rows = 0, nonempty = 0, ordered = -1, tiles_m = 0, count = 0, rotation = 0, joined = 0, g = 0;
    int64_t cells = 0;
    gmm_sm90_scheduler s = GMM_ZERO;
    for (int32_t g = 0; g < G; g++) {
        const int32_t rows = ends[g + 1] - ends[g];
        max_rows = rows > max_rows ? rows : max_rows;
        nonempty += rows > 0;
        shift[g] = -1;
    }
    s.p = &extents;
    s.ends = (int32_t *)(uintptr_t)ends;
    s.work_ends = work_ends;
    s.k_grouped = k->k_grouped;
    s.cluster_along_n = k->cluster_along_n;
    s.max_blocks = k->max_blocks;
    s.block_rows = k->block_rows;
    s.row_align = k->row_align;
    s.col_align = k->col_align;
    s.tiles_n = (n + k->tile_n - 1) / k->tile_n;
    if (!k->k_grouped && nonempty > 0 && max_rows <= k->block_rows * k->max_blocks)
        s.tiles_n = gmm_sm90_filling_tiles(nonempty, s.tiles_n, units_n, (int32_t)grid, cluster, max_rows <= 128);
    /* where weights do not bound the product, one tile less would make the widest one wider */
    T_CHECK(max_rows <= 128 || s.tiles_n == 1 ||
            (units_n + s.tiles_n - 2) / (s.tiles_n - 1) > (units_n + s.tiles_n - 1) / s.tiles_n,
            "%d tiles of %d columns", (int)s.tiles_n, (int)n);
    T_CHECK(s.tiles_n >= 1 && s.tiles_n <= units_n, "%d tiles of %d columns", (int)s.tiles_n, (int)n);
    sum_work(&s, G, cluster);
    memset(seen, 0, sizeof seen);
    for (int32_t work = 0; work < work_ends[G]; work++) {
        gmm_sm90_tile t[2];
        int32_t m = 0, units_m, first, position;
        memset(t, 0, sizeof t);
        for (int32_t rank = 0; rank < cluster; rank++) {
            const uint32_t stride = grid / (uint32_t)cluster;
            const uint32_t block = (uint32_t)work % stride * (uint32_t)cluster + (uint32_t)rank;
            T_CHECK(nth_tile(&s, G, block, grid, cluster, k->rotation, (uint32_t)work / stride, &t[rank]),
                    "work %d has no tile", (int)work);
        }
        while (work_ends[g + 1] <= work) g++;
        const int32_t in_group = work - work_ends[g];
        if (cluster == 2 && !k->k_grouped && in_group == gmm_sm90_row_tiles(&s, g) * s.tiles_n / 2) {
            /* the unpaired tiles of two groups, or the last one, in the order of groups */
            for (int32_t rank = 0; rank < 2; rank++) {
                const int32_t group = odd_group(&s, G, joined + rank);
                T_CHECK(group < 0 ? rank == 1 : t[rank].g == group, "work %d in group %d", (int)work, (int)t[rank].g);
                cells += check_tile(k, &s, work, &t[rank], group < 0 ? -1 : gmm_sm90_row_tiles(&s, group) - 1,
                                    s.tiles_n - 1, seen, sizeof seen);
                T_CHECK(t[rank].multicast == GMM_SM90_MULTICAST_NONE, "work %d: multicast", (int)work);
            }
            joined += 2;
            continue;
        }
        if (g != ordered) {
            ordered = g;
            m = k->k_grouped ? m_all : ends[g + 1] - ends[g];
            tiles_m = ((m + k->block_rows - 1) / k->block_rows + k->max_blocks - 1) / k->max_blocks;
            rotation = k->rotation != AS_WGRAD
                           ? k->rotation
                           : gmm_sm90_wgrad_rotation((int32_t)grid / cluster, work_ends[g + 1] - work_ends[g], tiles_m);
            count = promised(k, tiles_m, s.tiles_n, cluster, rotation == GMM_SM90_ROTATE_ROWS ? g : 0, order);
            T_CHECK(work_ends[g + 1] - work_ends[g] == count || work_ends[g + 1] - work_ends[g] == count + 1,
                    "group %d: work %d, not %d", (int)g, (int)(work_ends[g + 1] - work_ends[g]), (int)count);
        }
        m = k->k_grouped ? m_all : ends[g + 1] - ends[g];
        units_m = (m + k->row_align - 1) / k->row_align;
        for (first = 0; shift[g] < 0 && first < count; first++) /* where the group's order begins */
            if (t[0].m0 == k->row_align * part_begin(units_m, tiles_m, order[first][0]) &&
                t[0].n0 == k->col_align * part_begin(units_n, s.tiles_n, order[first][1]))
                shift[g] = first;
        T_CHECK(shift[g] >= 0 && (rotation == GMM_SM90_ROTATE_TILES || shift[g] == 0), "group %d begins nowhere",
                (int)g);
        position = (in_group + shift[g]) % count;
        for (int32_t rank = 0; rank < cluster; rank++) {
            T_CHECK(t[rank].g == g, "work %d in group %d", (int)work, (int)t[rank].g);
            cells += check_tile(k, &s, work, &t[rank], order[position][2 * rank], order[position][2 * rank + 1], seen,
                                sizeof seen);
        }
        if (cluster == 2) { /* multicast: a common operand; the CTA without a tile receives nothing */
            const int same_cols = t[0].n0 == t[1].n0 && t[0].cols == t[1].cols && t[1].cols > 0;
            const int same_rows = t[0].m0 == t[1].m0 && t[0].rows == t[1].rows && t[1].cols > 0;
            const int common = same_cols ? GMM_SM90_MULTICAST_B : same_rows ? GMM_SM90_MULTICAST_A
                                                                            : GMM_SM90_MULTICAST_NONE;
            T_CHECK(t[0].multicast == t[1].multicast && t[0].multicast == common,
                    "work %d: multicast %d", (int)work, (int)t[0].multicast);
        } else T_CHECK(t[0].multicast == GMM_SM90_MULTICAST_NONE, "work %d: multicast", (int)work);
    }
    for (int32_t g = 0; g < G; g++) { /* nothing is left out */
        const int32_t m = k->k_grouped ? m_all : ends[g + 1] - ends[g];
        cells -= (int64_t)((m + k->row_align - 1) / k->row_align) * units_n;
    }
    T_CHECK(cells == 0, "%lld cells too many", (long long)cells);
    for (uint32_t block = 0; block < grid; block++) { /* every CTA ends */
        gmm_sm90_tile t;
        const uint32_t stride = grid / (uint32_t)cluster, b = block / (uint32_t)cluster, all = (uint32_t)work_ends[G];
        const uint32_t works = all > b ? (all - b + stride - 1) / stride : 0;
        T_CHECK(!nth_tile(&s, G, block, grid, cluster, k->rotation, works, &t), "CTA %u ends late", block);
    }
}

/* Rows of D of the busiest CTA, over those of all: where the number of row tiles divides the number of clusters, and
   the last row tiles are lower, the same CTAs must not get these in every group. */
static void shares(int arg) {
    static const struct {
        int32_t groups, m, n;
    } problems[] = { { 256, 512, 4096 }, { 128, 1024, 4096 }, { 128, 512, 1536 }, { 64, 1024, 1024 } };
    static int32_t ends[MOST_GROUPS + 1], work_ends[MOST_GROUPS + 1];
    const struct kind *k = &kinds[5]; /* wgrad 192x128 */
    const int32_t G = problems[arg].groups, grid = 132, cluster = 2;
    const gmm_gemm_args extents = { G, problems[arg].m, problems[arg].n, 777 };
    gmm_sm90_scheduler s = GMM_ZERO;
    int64_t most = 0, all = 0;
    for (int32_t g = ends[0] = 0; g < G; g++) ends[g + 1] = ends[g] + 64;
    s.p = &extents;
    s.ends = ends;
    s.work_ends = work_ends;
    s.k_grouped = 1;
    s.cluster_along_n = k->cluster_along_n;
    s.max_blocks = k->max_blocks;
    s.block_rows = k->block_rows;
    s.row_align = k->row_align;
    s.col_align = k->col_align;
    s.tiles_n = (problems[arg].n + k->tile_n - 1) / k->tile_n;
    sum_work(&s, G, cluster);
    for (int32_t block = 0; block < grid; block++) {
        gmm_sm90_tile t;
        int64_t rows = 0;
        for (uint32_t i = 0; nth_tile(&s, G, (uint32_t)block, (uint32_t)grid, cluster, k->rotation, i, &t); i++)
            rows += t.rows;
        all += rows;
        most = rows > most ? rows : most;
    }
    t_about("%d groups of %d x %d", (int)G, (int)problems[arg].m, (int)problems[arg].n);
    T_CHECK((double)most * grid <= 1.05 * (double)all, "the busiest CTA has %.3f times the mean",
            (double)most * grid / (double)all);
}

static void tiles(int arg) {
    static const int32_t counts[] = { 0, 1, 2, 7, 33, 128, 4096 }, widths[] = { 1, 64, 200, 1032 };
    static const struct {
        uint32_t grid;
        int32_t cluster;
    } grids[] = { { 1, 1 }, { 3, 1 }, { 132, 1 }, { 2, 2 }, { 12, 2 }, { 132, 2 } };
    static int32_t ends[MOST_GROUPS + 1];
    const struct kind *k = &kinds[arg];
    for (int64_t sp = 0; sp < T_COUNT(splits); sp++)
        for (int64_t c = 0; c < T_COUNT(counts); c++)
            for (int64_t i = 0; i < T_COUNT(grids) * T_COUNT(widths); i++) {
                const int32_t G = counts[c], n = widths[i / T_COUNT(grids)];
                const uint32_t grid = grids[i % T_COUNT(grids)].grid;
                if (G == 4096 && (n > 64 || grid == 3 || grid == 12)) continue; /* few of the largest */
                for (int32_t g = ends[0] = 0; g < G; g++)
                    ends[g + 1] = least(ends[g] + splits[sp].rows(g, G), MOST_ROWS);
                t_about("%s: %s rows of %d groups, n %d, grid %u in clusters of %d", k->name, splits[sp].name, (int)G,
                        (int)n, grid, (int)grids[i % T_COUNT(grids)].cluster);
                check_tiles(k, ends, G, k->k_grouped ? G > 128 ? 100 : 1000 : 0, n, grid,
                            grids[i % T_COUNT(grids)].cluster);
            }
}

/* The balanced order of wgrad: every cluster tile of every group once; the same number of cluster tiles of a group for
   every cluster, then at most one more; loads of clusters that differ by no more than one tile. */
static void balanced(int arg) {
    static const int32_t counts[] = { 1, 2, 8, 33, 128, 256 }, works[] = { 1, 24, 65, 66, 300, 1000 };
    static const int32_t clusters[] = { 1, 3, 66, 96 };
    static unsigned char seen[256][1000];
    static int32_t ends[257];
    for (int64_t i = 0; i < T_COUNT(counts) * T_COUNT(works) * T_COUNT(clusters); i++) {
        const int32_t C = clusters[i % T_COUNT(clusters)], work = works[i / T_COUNT(clusters) % T_COUNT(works)];
        const int32_t G = counts[i / T_COUNT(clusters) / T_COUNT(works)];
        int32_t least_load = INT32_MAX, most_load = 0, longest = 0, total = 0;
        for (int32_t g = ends[0] = 0; g < G; g++)
            ends[g + 1] = least(ends[g] + splits[arg].rows(g, G), MOST_ROWS);
        t_about("%s rows of %d groups with %d cluster tiles, %d clusters", splits[arg].name, (int)G, (int)work, (int)C);
        memset(seen, 0, sizeof seen);
        for (int32_t c = 0; c < C; c++) {
            gmm_sm90_balance b;
            int32_t g, w, load = 0, last_k = INT32_MAX, last_rest = 0;
            begin_balance(&b, ends, G, work, c, C);
            b.min_load = 7;
            for (int32_t n = 0; balanced_tile(&b, ends, G, n, &g, &w); n++, total++) {
                const int32_t k = ends[g + 1] - ends[g], stages = gmm_sm90_tile_load(&b, k);
                T_CHECK(g >= 0 && g < G && w >= 0 && w < work && !seen[g][w], "cluster %d: work %d of group %d", (int)c,
                        (int)w, (int)g);
                seen[g][w] = 1;
                const int rest = w >= work / C * C; /* rounds of groups whose lengths fall, then rests of such */
                T_CHECK(rest >= last_rest && (rest > last_rest || k <= last_k) && (rest || w % C == c),
                        "cluster %d: work %d of group %d out of order", (int)c, (int)w, (int)g);
                last_k = k;
                last_rest = rest;
                load += stages;
                longest = stages > longest ? stages : longest;
            }
            least_load = load < least_load ? load : least_load;
            most_load = load > most_load ? load : most_load;
        }
        T_CHECK(total == G * work, "%d cluster tiles of %d", (int)total, (int)(G * work));
        T_CHECK(most_load - least_load <= longest, "loads from %d to %d, a tile has %d", (int)least_load,
                (int)most_load, (int)longest);
    }
    T_CHECK(gmm_sm90_is_skewed(8 * 2048, 4096, 8) && !gmm_sm90_is_skewed(8 * 2048, 2048, 8), "skewed by the largest");
    T_CHECK(!gmm_sm90_is_skewed(8 * 512, 4096, 8) && gmm_sm90_is_skewed(1 << 30, 1 << 30, 2), "skewed by the mean");
}

void tests_scheduler(void) {
    for (int i = 0; i < (int)T_COUNT(splits); i++) t_add_host(balanced, i, "scheduler balanced %s", splits[i].name);
    for (int i = 0; i < (int)T_COUNT(kinds); i++) t_add_host(tiles, i, "scheduler tiles %s", kinds[i].name);
    for (int i = 0; i < 4; i++) t_add_host(shares, i, "scheduler shares of CTAs in wgrad %d", i);
}
