/* gtp.h - fuzz target of the functions of GTP that take plain numbers: shard plans and extents, process grids, the
   forecast of memory and time, and the moves between shards of different sizes. Any bytes are accepted; 1: the library
   took the shard. What a refused call says, and what an accepted one promises, is checked; a violation calls abort. */
#ifndef GMM_TESTS_FUZZ_GTP_H
#define GMM_TESTS_FUZZ_GTP_H

#include "gmm.h"

#include "gmm_gtp.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct gtp_input { const uint8_t *data, *end; } gtp_input;

static inline int gtp_byte(gtp_input *in) { return in->data < in->end ? *in->data++ : 0; }

/* A number: mostly a small one, else any 64 bits, among them those next to the limits. */
static inline int64_t gtp_number(gtp_input *in) {
    const int first = gtp_byte(in);
    uint64_t wide = 0;
    if (first < 224) return first;
    if (first == 224) return 0;
    if (first < 240) return ((int64_t)1 << (first - 225) * 4) * (gtp_byte(in) & 127);
    if (first == 240) return INT64_MAX - gtp_byte(in);
    if (first == 241) return INT32_MAX - gtp_byte(in);
    if (first == 242) return INT64_MIN + gtp_byte(in);
    for (int i = 0; i < 8; i++) wide = wide << 8 | (uint64_t)gtp_byte(in);
    return (int64_t)(wide >> (first & 7) * 8);
}
static inline int32_t gtp_int(gtp_input *in) { return (int32_t)(uint32_t)(uint64_t)gtp_number(in); }

#define gtp_require(holds) \
    do { \
        if (!(holds)) { \
            fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #holds); \
            abort(); \
        } \
    } while (0)
/* A refused call says why; an accepted one leaves the error alone. */
static inline int gtp_accepted(gmm_status status, const gmm_error *error) {
    gtp_require(status == GMM_OK || (error->status == status && error->text[0]));
    return status == GMM_OK;
}

enum { GTP_SECTIONS = 6, GTP_ROWS = 512, GTP_RANKS = 64 };

/* A weight of up to GTP_SECTIONS sections; the shard of rank 0. */
typedef struct gtp_weight { gmm_shard shard; int64_t sections[GTP_SECTIONS]; } gtp_weight;

static inline void gtp_read_weight(gtp_input *in, gtp_weight *w) {
    gmm_shard *s = &w->shard;
    const int kind = gtp_byte(in);
    int count;
    memset(w, 0, sizeof *w);
    s->dtype = (gmm_dtype)(gtp_byte(in) % 12);
    s->scaling = (gmm_scaling)(gtp_byte(in) % 8);
    s->tp_cut = (gmm_tp_cut)(kind % 4);
    s->tp_size = gtp_int(in);
    s->tp_rank = gtp_int(in);
    s->gtp_size = gtp_int(in);
    s->gtp_rank = gtp_int(in);
    s->rows = gtp_number(in);
    s->cols = gtp_number(in);
    s->tp_multiple = kind & 8 ? gtp_int(in) : 0;
    s->unit = kind & 16 ? (int64_t)((uint64_t)gtp_number(in) - 1) : 0;
    if (!(kind & 32)) return;
    count = gtp_byte(in) % (GTP_SECTIONS + 1);
    if (count) s->rows = 0;
    for (int i = 0; i < count; i++) {
        w->sections[i] = gtp_number(in);
        s->rows = (int64_t)((uint64_t)s->rows + (uint64_t)w->sections[i]);
    }
    s->section_rows = w->sections;
    s->sections = count;
}

static inline void gtp_check_plan(const gmm_shard *s, const gmm_shard_plan *p) {
    const int32_t g = s->gtp_size ? s->gtp_size : 1;
    gtp_require(p->pad >= 0 && p->padded_rows == p->local_rows + p->pad && p->shard_rows == p->padded_rows / g);
    gtp_require(p->padded_rows % g == 0 && p->valid_rows >= 0 && p->valid_rows <= p->shard_rows);
    gtp_require(p->row0 == s->gtp_rank * p->shard_rows && p->local_cols >= 1 && p->col0 + p->local_cols <= s->cols);
    gtp_require(g == 1 || p->unit == 0 || (p->shard_rows % p->unit == 0 && p->pad < p->unit * g));
    for (int d = 0; d < 2; d++)
        gtp_require(p->shard_data_bytes[d] >= 0 && p->shard_data_bytes[d] <= p->gather_data_bytes[d] &&
                    p->shard_scale_bytes[d] >= 0 && p->gather_scale_bytes[d] >= 0);
}

/* Every logical row belongs to the extents of exactly one rank, or where TP cuts no rows to one of each TP rank. */
static inline void gtp_check_ranks(const gmm_shard *all) {
    const int32_t tp = all->tp_size ? all->tp_size : 1, g = all->gtp_size ? all->gtp_size : 1;
    uint8_t seen[GTP_ROWS] = {0};
    for (int32_t rank = 0; rank < tp * g; rank++) {
        gmm_shard s = *all;
        gmm_shard_plan p = GMM_ZERO;
        gmm_extent x[GTP_SECTIONS];
        gmm_error e = GMM_ZERO;
        int32_t n = -1;
        int64_t at = 0;
        s.tp_rank = rank / g;
        s.gtp_rank = rank % g;
        gtp_require(gmm_gtp_plan(&s, &p, &e) == GMM_OK);
        gtp_check_plan(&s, &p);
        gtp_require(gmm_gtp_extents(&s, x, GTP_SECTIONS, &n, &e) == GMM_OK && n >= 0 && n <= GTP_SECTIONS);
        for (int32_t i = 0; i < n; i++) {
            gtp_require(x[i].begin < x[i].end && x[i].shard_row == at && x[i].logical_row >= x[i].begin);
            for (int64_t r = 0; r < x[i].end - x[i].begin; r++) seen[x[i].logical_row + r]++;
            at += x[i].end - x[i].begin;
        }
        gtp_require(at == p.valid_rows);
    }
    for (int64_t i = 0; i < all->rows; i++) gtp_require(seen[i] == (all->tp_cut == GMM_TP_ROWS ? 1 : tp));
}

static inline void gtp_fuzz_forecast(gtp_input *in, const gmm_shard *shard) {
    gmm_gtp_use use = GMM_ZERO;
    gmm_gtp_memory memory = GMM_ZERO;
    gmm_gtp_forecast f = GMM_ZERO;
    gmm_gtp_stage stages[4] = {GMM_ZERO, GMM_ZERO, GMM_ZERO, GMM_ZERO};
    gmm_error e = GMM_ZERO;
    int32_t *const fields[] = {&use.bundle, &use.gather_slots, &use.recompute_slots, &use.wgrad_slots,
                               &use.reduce_slots, &use.optimizer_bytes, &use.optimizer_ranks};
    const int kind = gtp_byte(in);
    use.shard = shard;
    for (int i = 0; i < 7; i++) *fields[i] = gtp_int(in);
    use.layers = gtp_number(in);
    use.all_to_all = kind & 1;
    use.main_grad = (gmm_dtype)(kind >> 1 & 3);
    use.wire = (gmm_dtype)(kind >> 3 & 3);
    for (int i = 0; i < 2; i++)
        if (gtp_accepted(gmm_gtp_memory_add(&use, &memory, &e), &e))
            gtp_require(memory.weights >= 0 && memory.optimizer >= 0 && memory.stage >= 0 &&
                        memory.total == memory.weights + memory.main_grads + memory.optimizer + memory.gather +
                                            memory.wgrad + memory.reduce + memory.stage);
    f.stages = 1 + kind % 4;
    f.gemm_rate = (double)gtp_number(in);
    f.link_rate = (double)gtp_number(in);
    f.latency = (double)gtp_number(in);
    f.memory_rate = (double)gtp_number(in);
    f.wire = (gmm_dtype)(kind >> 1 & 3);
    f.main_grad = (gmm_dtype)(kind >> 3 & 3);
    f.prefetch = gtp_int(in);
    f.wgrad_slots = gtp_int(in);
    f.wrap = kind >> 6 & 1;
    for (int i = 0; i < f.stages; i++) {
        stages[i].shard = shard;
        stages[i].bundle = gtp_int(in);
        stages[i].tokens = (double)gtp_number(in);
    }
    if (gtp_accepted(gmm_gtp_foresee(&f, stages, &e), &e))
        gtp_require(f.gathered_bytes >= 0 && f.reduced_bytes >= 0 && !(f.step < f.compute) && !(f.exposed_reduce < 0));
}

static inline void gtp_fuzz_grid(gtp_input *in) {
    gmm_grid grid = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    int32_t world = 0, writers = 0, cut = 1;
    const uint32_t axes = (uint32_t)gtp_byte(in);
    grid.kind = (gmm_grid_kind)(gtp_byte(in) % 3);
    for (int i = 0; i < GMM_AXIS_COUNT; i++) grid.size[i] = gtp_int(in);
    if (!gtp_accepted(gmm_grid_world(&grid, &world, &e), &e)) return;
    for (int i = 0; i < GMM_AXIS_COUNT; i++)
        if (axes >> i & 1) cut *= grid.size[i] ? grid.size[i] : 1;
    for (int32_t rank = 0; rank < world && world <= 4096; rank++) {
        int32_t coords[GMM_AXIS_COUNT], back = -1, writes = -1;
        gmm_grid_group group = GMM_ZERO;
        gtp_require(gmm_grid_coords(&grid, rank, coords, &e) == GMM_OK);
        gtp_require(gmm_grid_rank(&grid, coords, &back, &e) == GMM_OK && back == rank);
        if (!gtp_accepted(gmm_grid_group_of(&grid, rank, axes, &group, &e), &e)) return; /* unknown axes */
        gtp_require(group.size == cut && group.index >= 0 && group.index < group.size && group.first <= rank);
        gtp_require(gmm_gtp_writes(&grid, rank, axes, &writes, &e) == GMM_OK && (writes == 0 || writes == 1));
        writers += writes;
    }
    if (world <= 4096) gtp_require(writers == cut);
}

/* The value of an element of the logical weight; rows that are none are padding. */
static inline int32_t gtp_value(const gmm_shard *s, int64_t row, int64_t col) {
    return row < 0 ? 0 : (int32_t)(1 + row * s->cols + col);
}
/* The bytes of a shard of I32-sized elements, from the definition of its extents. */
static inline int32_t *gtp_shard_bytes(const gmm_shard *s, gmm_shard_plan *p) {
    gmm_extent x[GTP_SECTIONS];
    gmm_error e = GMM_ZERO;
    int32_t n = 0, *to;
    gtp_require(gmm_gtp_plan(s, p, &e) == GMM_OK && gmm_gtp_extents(s, x, GTP_SECTIONS, &n, &e) == GMM_OK);
    to = (int32_t *)calloc((size_t)(p->shard_rows * p->local_cols) + 1, sizeof *to);
    gtp_require(to != NULL);
    for (int32_t i = 0; i < n; i++)
        for (int64_t r = 0; r < x[i].end - x[i].begin; r++)
            for (int64_t c = 0; c < p->local_cols; c++)
                to[(x[i].shard_row + r) * p->local_cols + c] = gtp_value(s, x[i].logical_row + r, p->col0 + c);
    return to;
}

/* Shards of all ranks of one size, imported as that of a rank of another size: each byte is what it is to be. */
static inline void gtp_fuzz_import(const gmm_shard *from, const gmm_shard *to) {
    const int32_t tp = from->tp_size ? from->tp_size : 1, g = from->gtp_size ? from->gtp_size : 1;
    gmm_ckpt_table *table = NULL;
    gmm_ckpt_plan *plan = NULL;
    gmm_ckpt_part part = GMM_ZERO;
    gmm_gtp_stored stored[GTP_RANKS];
    gmm_shard shards[GTP_RANKS];
    int32_t *data[GTP_RANKS], *want;
    gmm_gtp_item item = GMM_ZERO;
    gmm_ckpt_report report;
    gmm_shard_plan p = GMM_ZERO;
    memset(&report, 0, sizeof report);
    memset(stored, 0, sizeof stored);
    gtp_require(gmm_ckpt_table_create(&table, NULL, NULL) == GMM_OK);
    for (int32_t rank = 0; rank < tp * g; rank++) {
        gmm_ckpt_tensor t = GMM_ZERO;
        char name[32];
        shards[rank] = *from;
        shards[rank].tp_rank = rank / g;
        shards[rank].gtp_rank = rank % g;
        data[rank] = gtp_shard_bytes(&shards[rank], &p);
        (void)snprintf(name, sizeof name, "shard %d", (int)rank);
        t.name = name;
        t.dtype = from->dtype;
        t.rank = 2;
        t.shape[0] = p.shard_rows;
        t.shape[1] = p.local_cols;
        t.bytes = p.shard_data_bytes[0];
        gtp_require(gmm_ckpt_table_add_storage(table, data[rank], t.bytes, &t.storage, NULL) == GMM_OK);
        gtp_require(gmm_ckpt_table_add(table, &t, &report) == GMM_OK);
        stored[rank].shard = &shards[rank];
        stored[rank].data = rank;
        stored[rank].scale = -1;
    }
    part.table = table;
    item.name = "w";
    item.shard = to;
    item.stored_count = tp * g;
    item.stored = stored;
    if (gtp_accepted(gmm_gtp_import(&plan, &part, 1, &item, 1, NULL, &report), &report.error)) {
        gmm_ckpt_run run = GMM_ZERO;
        gmm_ckpt_cost cost = GMM_ZERO;
        int64_t cursor = 0;
        want = gtp_shard_bytes(to, &p);
        gtp_require(gmm_ckpt_cost_of(plan, &cost, NULL) == GMM_OK && cost.target_bytes >= p.shard_data_bytes[0]);
        run.memory = malloc((size_t)cost.target_bytes + 1);
        gtp_require(run.memory && gmm_ckpt_verify(plan, NULL, 0, &report.error) == GMM_OK);
        gtp_require(gmm_ckpt_apply(plan, &run, &cursor, &report.error) == GMM_OK);
        gtp_require(!memcmp(run.memory, want, (size_t)p.shard_data_bytes[0]));
        free(run.memory);
        free(want);
    }
    gmm_ckpt_plan_destroy(plan);
    gmm_ckpt_table_destroy(table);
    for (int32_t rank = 0; rank < tp * g; rank++) free(data[rank]);
}

/* Whether all ranks of the shard's sizes are few enough to go through. */
static inline int gtp_small(const gmm_shard *s) {
    return s->tp_size >= 0 && s->tp_size <= GTP_RANKS && s->gtp_size >= 0 && s->gtp_size <= GTP_RANKS &&
           (s->tp_size ? s->tp_size : 1) * (s->gtp_size ? s->gtp_size : 1) <= GTP_RANKS && s->rows <= GTP_ROWS;
}

/* Input: a weight, the uses of the forecast, a grid, and the sizes to which the shards are imported. */
static inline int fuzz_gtp(const uint8_t *data, size_t size) {
    gtp_input in;
    gtp_weight w;
    gmm_shard_plan p = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    int accepted;
    if (!size) return 0;
    in.data = data;
    in.end = data + size;
    gtp_read_weight(&in, &w);
    accepted = gtp_accepted(gmm_gtp_plan(&w.shard, &p, &e), &e);
    if (accepted) {
        gtp_check_plan(&w.shard, &p);
        if (gtp_small(&w.shard)) gtp_check_ranks(&w.shard);
    }
    gtp_fuzz_forecast(&in, &w.shard);
    gtp_fuzz_grid(&in);
    w.shard.dtype = GMM_F32; /* elements are numbered */
    w.shard.scaling = GMM_SCALING_NONE;
    if (gtp_small(&w.shard) && w.shard.cols <= 32 && gmm_gtp_plan(&w.shard, &p, &e) == GMM_OK) {
        gmm_shard to = w.shard;
        to.tp_size = 1 + gtp_byte(&in) % 8;
        to.tp_rank = gtp_byte(&in) % 8;
        to.gtp_size = 1 + gtp_byte(&in) % 8;
        to.gtp_rank = gtp_byte(&in) % 8;
        to.unit = w.shard.unit ? gtp_byte(&in) % 40 : 0;
        to.tp_multiple = 0;
        if (p.shard_rows * p.local_cols <= 1 << 16 && gmm_gtp_plan(&to, &p, &e) == GMM_OK &&
            p.shard_rows * p.local_cols <= 1 << 16)
            gtp_fuzz_import(&w.shard, &to);
    }
    return accepted;
}

#endif
