/* Process grids, the replica rule, and seeds of ranks. */

/* The axis with the i-th smallest stride of ranks. */
static int gmm__grid_axis(gmm_grid_kind kind, int i) {
    static const int8_t order[2][GMM_AXIS_COUNT] = {
        {GMM_AXIS_TP, GMM_AXIS_GTP, GMM_AXIS_CP, GMM_AXIS_EP, GMM_AXIS_DP, GMM_AXIS_PP},
        {GMM_AXIS_TP, GMM_AXIS_CP, GMM_AXIS_EP, GMM_AXIS_GTP, GMM_AXIS_DP, GMM_AXIS_PP}};
    return order[kind == GMM_GRID_EXPERT][i];
}

/* Copies and checks a grid; *world is its number of ranks. */
static gmm_status gmm__grid_read(const char *fn, const gmm_grid *desc, gmm_grid *g, int32_t *world, gmm_error *error) {
    static const char *const names[GMM_AXIS_COUNT] = {"TP", "GTP", "CP", "EP", "DP", "PP"};
    gmm_status status = gmm__gtp_read(fn, "grid", desc, g, sizeof *g, error);
    int64_t ranks = 1;
    int a, absent;
    if (status) return status;
    if (g->kind != GMM_GRID_DENSE && g->kind != GMM_GRID_EXPERT)
        return gmm__fail(error, GMM_E_ARG, "%s: kind is %d: must be a gmm_grid_kind", fn, (int)g->kind);
    absent = g->kind == GMM_GRID_EXPERT ? GMM_AXIS_CP : GMM_AXIS_EP;
    for (a = 0; a < GMM_AXIS_COUNT; a++) {
        if (g->size[a] < 0)
            return gmm__fail(error, GMM_E_ARG, "%s: size of %s is %d: must be >= 0", fn, names[a], g->size[a]);
        if (g->size[a] == 0) g->size[a] = 1;
        if (a == absent && g->size[a] > 1)
            return gmm__fail(error, GMM_E_CONFIG, "%s: size of %s is %d: %s grid has no such axis", fn, names[a],
                             g->size[a], g->kind == GMM_GRID_EXPERT ? "an expert" : "a dense");
        ranks *= g->size[a]; /* both operands are below 2^31 */
        if (ranks > INT32_MAX)
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: the grid has more than 2^31 - 1 ranks", fn);
    }
    *world = (int32_t)ranks;
    return GMM_OK;
}

GMMDEF gmm_status gmm_grid_world(const gmm_grid *grid, int32_t *world, gmm_error *error) {
    gmm_grid g;
    if (!world) return gmm__fail(error, GMM_E_NULL, "gmm_grid_world: world is NULL");
    return gmm__grid_read("gmm_grid_world", grid, &g, world, error);
}

static gmm_status gmm__grid_coords(const char *fn, const gmm_grid *grid, int32_t rank, gmm_grid *g, int32_t *coords,
                                   gmm_error *error) {
    int32_t world = 0;
    gmm_status status = gmm__grid_read(fn, grid, g, &world, error);
    int i;
    if (status) return status;
    if (rank < 0 || rank >= world)
        return gmm__fail(error, GMM_E_ARG, "%s: rank is %d: must be in [0, %d)", fn, rank, world);
    for (i = 0; i < GMM_AXIS_COUNT; i++) {
        const int a = gmm__grid_axis(g->kind, i);
        coords[a] = rank % g->size[a];
        rank /= g->size[a];
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_grid_coords(const gmm_grid *grid, int32_t rank, int32_t coords[GMM_AXIS_COUNT],
                                  gmm_error *error) {
    gmm_grid g;
    int32_t c[GMM_AXIS_COUNT];
    gmm_status status;
    if (!coords) return gmm__fail(error, GMM_E_NULL, "gmm_grid_coords: coords is NULL");
    status = gmm__grid_coords("gmm_grid_coords", grid, rank, &g, c, error);
    if (!status) memcpy(coords, c, sizeof c);
    return status;
}

GMMDEF gmm_status gmm_grid_rank(const gmm_grid *grid, const int32_t coords[GMM_AXIS_COUNT], int32_t *rank,
                                gmm_error *error) {
    gmm_grid g;
    int32_t world = 0, r = 0;
    gmm_status status;
    int i;
    if (!coords) return gmm__fail(error, GMM_E_NULL, "gmm_grid_rank: coords is NULL");
    if (!rank) return gmm__fail(error, GMM_E_NULL, "gmm_grid_rank: rank is NULL");
    status = gmm__grid_read("gmm_grid_rank", grid, &g, &world, error);
    if (status) return status;
    for (i = GMM_AXIS_COUNT - 1; i >= 0; i--) {
        const int a = gmm__grid_axis(g.kind, i);
        if (coords[a] < 0 || coords[a] >= g.size[a])
            return gmm__fail(error, GMM_E_ARG, "gmm_grid_rank: coords[%d] is %d: must be in [0, %d)", a, (int)coords[a],
                             g.size[a]);
        r = r * g.size[a] + coords[a];
    }
    *rank = r;
    return GMM_OK;
}

/* The group of the ranks whose coordinates differ from those of `rank` along `axes` alone. */
static gmm_status gmm__grid_group(const char *fn, const gmm_grid *grid, int32_t rank, uint32_t axes,
                                  gmm_grid_group *group, gmm_error *error) {
    gmm_grid g;
    gmm_grid_group out = GMM_ZERO;
    int32_t coords[GMM_AXIS_COUNT], stride = 1;
    gmm_status status;
    int i;
    if (axes >> GMM_AXIS_COUNT)
        return gmm__fail(error, GMM_E_ARG, "%s: axes is 0x%x: bits beyond 1u << GMM_AXIS_PP are unknown", fn,
                         axes);
    status = gmm__grid_coords(fn, grid, rank, &g, coords, error);
    if (status) return status;
    out.first = rank;
    out.size = 1;
    for (i = 0; i < GMM_AXIS_COUNT; i++) {
        const int a = gmm__grid_axis(g.kind, i);
        if (axes >> a & 1u) {
            out.first -= coords[a] * stride;
            out.index += coords[a] * out.size;
            out.size *= g.size[a];
        }
        stride *= g.size[a];
    }
    *group = out;
    return GMM_OK;
}

GMMDEF gmm_status gmm_grid_group_of(const gmm_grid *grid, int32_t rank, uint32_t axes, gmm_grid_group *group,
                                    gmm_error *error) {
    if (!group) return gmm__fail(error, GMM_E_NULL, "gmm_grid_group_of: group is NULL");
    return gmm__grid_group("gmm_grid_group_of", grid, rank, axes, group, error);
}

GMMDEF gmm_status gmm_grid_match(const gmm_grid *dense, const gmm_grid *expert, gmm_error *error) {
    gmm_grid d, x;
    int32_t dense_world = 0, expert_world = 0;
    gmm_status status = gmm__grid_read("gmm_grid_match", dense, &d, &dense_world, error);
    if (status) return status;
    status = gmm__grid_read("gmm_grid_match", expert, &x, &expert_world, error);
    if (status) return status;
    if (d.kind != GMM_GRID_DENSE || x.kind != GMM_GRID_EXPERT)
        return gmm__fail(error, GMM_E_CONFIG, "gmm_grid_match: kinds are %d and %d: must be a dense and an expert grid",
                         (int)d.kind, (int)x.kind);
    if (dense_world != expert_world)
        return gmm__fail(error, GMM_E_CONFIG, "gmm_grid_match: the dense grid has %d ranks, the expert grid %d: must "
                         "be equal", dense_world, expert_world);
    if (d.size[GMM_AXIS_PP] != x.size[GMM_AXIS_PP])
        return gmm__fail(error, GMM_E_CONFIG, "gmm_grid_match: PP is %d in the dense grid and %d in the expert grid: "
                         "must be equal", d.size[GMM_AXIS_PP], x.size[GMM_AXIS_PP]);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_writes(const gmm_grid *grid, int32_t rank, uint32_t cut_axes, int32_t *writes,
                                 gmm_error *error) {
    const uint32_t all = (1u << GMM_AXIS_COUNT) - 1u;
    gmm_grid_group replicas = GMM_ZERO;
    gmm_status status;
    if (!writes) return gmm__fail(error, GMM_E_NULL, "gmm_gtp_writes: writes is NULL");
    if (cut_axes & ~all)
        return gmm__fail(error, GMM_E_ARG, "gmm_gtp_writes: cut_axes is 0x%x: bits beyond 1u << GMM_AXIS_PP are "
                         "unknown", cut_axes);
    status = gmm__grid_group("gmm_gtp_writes", grid, rank, cut_axes ^ all, &replicas, error);
    if (status) return status;
    *writes = replicas.index == 0;
    return GMM_OK;
}

GMMDEF uint64_t gmm_gtp_seed(uint64_t base, gmm_grid_kind kind, uint32_t gtp_rank) {
    return base + (kind == GMM_GRID_EXPERT ? 32768u : 0u) + 65536u * (1u + (uint64_t)gtp_rank);
}

