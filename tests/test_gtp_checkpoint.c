/* test_gtp_checkpoint.c - shards to and from checkpoints: gmm_gtp_export, gmm_gtp_import */
#include "gtp_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64 }; /* ranks of TP and GTP together */

/* A weight and how TP cuts it. */
typedef struct kind {
    const char *name;
    gmm_tp_cut cut;
    int64_t rows, cols;
    int64_t sections[5];
    int32_t count;
    int64_t unit;
} kind;

static const kind kinds[] = {
    {"whole", GMM_TP_WHOLE, 40, 6, {0}, 0, 0}, {"column-parallel", GMM_TP_ROWS, 152, 5, {0}, 0, 16},
    {"row-parallel", GMM_TP_COLS, 44, 12, {0}, 0, 0}, {"gated", GMM_TP_ROWS, 120, 4, {60, 60}, 2, 16},
    {"five sections", GMM_TP_ROWS, 152, 3, {60, 18, 40, 2, 32}, 5, 8},
    {"all padding", GMM_TP_WHOLE, 8, 7, {0}, 0, 16}};

static gmm_shard shard_of(const kind *k, gmm_dtype dtype, gmm_scaling scaling, int tp, int g, int rank) {
    gmm_shard s = GMM_ZERO;
    s.dtype = dtype;
    s.scaling = scaling;
    s.tp_cut = k->cut;
    s.tp_size = tp;
    s.tp_rank = rank / g;
    s.gtp_size = g;
    s.gtp_rank = rank % g;
    s.rows = k->rows;
    s.cols = k->cols;
    s.section_rows = k->count ? k->sections : NULL;
    s.sections = k->count;
    s.unit = k->unit;
    return s;
}
static gmm_shard_plan plan_of(const gmm_shard *s) {
    gmm_shard_plan p = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    T_OK_TEXT(gmm_gtp_plan(s, &p, &e), e.text);
    return p;
}

/* A distinct value for every element of a logical weight, exact in bf16. */
static float value_at(const kind *k, int64_t row, int64_t col) {
    const int64_t i = row * k->cols + col;
    return (float)(1 + i % 120) * (float)(1 << i / 120 % 15);
}

/* Logical row at row i of the padded local matrix, -1 for padding. Written from the definition, apart from the library:
   the TP slice of the first section, then that of the second. */
static int64_t logical_row(const kind *k, int tp, int tp_rank, int64_t i) {
    int64_t first = 0;
    for (int n = 0; n < (k->count ? k->count : 1); n++) {
        const int64_t rows = k->count ? k->sections[n] : k->rows, slice = k->cut == GMM_TP_ROWS ? rows / tp : rows;
        if (i < slice) return first + (k->cut == GMM_TP_ROWS ? tp_rank * slice : 0) + i;
        i -= slice;
        first += rows;
    }
    return -1;
}

/* The shard of one rank; padding rows are filled with `pad`. */
static void *shard_make(const kind *k, gmm_dtype dtype, int tp, int g, int rank, double pad) {
    const gmm_shard s = shard_of(k, dtype, GMM_SCALING_NONE, tp, g, rank);
    const gmm_shard_plan p = plan_of(&s);
    void *to = t_host((size_t)p.shard_data_bytes[0]);
    for (int64_t i = 0; i < p.shard_rows; i++)
        for (int64_t j = 0; j < p.local_cols; j++) {
            const int64_t row = logical_row(k, tp, s.tp_rank, p.row0 + i);
            const float v = row < 0 ? (float)pad : value_at(k, row, p.col0 + j);
            gmm_store(dtype, to, i * p.local_cols + j, v);
        }
    return to;
}

/* --------------------------------------------------------------------------------------------- Tables and plans --- */

typedef struct table_set {
    gmm_ckpt_table *table;
    gmm_ckpt_part part;
} table_set;
static table_set opened[4];

static table_set *table_set_open(int i) {
    gmm_error e = GMM_ZERO;
    gmm_ckpt_table_destroy(opened[i].table);
    memset(&opened[i], 0, sizeof opened[i]);
    T_OK_TEXT(gmm_ckpt_table_create(&opened[i].table, NULL, &e), e.text);
    opened[i].part.table = opened[i].table;
    return &opened[i];
}
static void table_sets_close(void) {
    for (int i = 0; i < 4; i++) {
        gmm_ckpt_table_destroy(opened[i].table);
        opened[i].table = NULL;
    }
}

/* Adds a tensor with a buffer of its own, or without data, and returns its index. */
static int32_t table_set_add(table_set *b, const char *name, gmm_dtype dtype, int64_t rows, int64_t cols,
                             const void *data) {
    gmm_ckpt_tensor t = GMM_ZERO;
    gmm_ckpt_report report = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    t.name = name;
    t.dtype = dtype;
    t.rank = 2;
    t.shape[0] = rows;
    t.shape[1] = cols;
    t.bytes = rows * cols * gmm_dtype_bits(dtype) / 8;
    T_OK_TEXT(gmm_ckpt_table_add_storage(b->table, data, t.bytes, &t.storage, &e), e.text);
    T_OK_TEXT(gmm_ckpt_table_add(b->table, &t, &report), report.error.text);
    return (int32_t)gmm_ckpt_table_find(b->table, name);
}

static gmm_ckpt_plan *current_plan; /* the current plan, destroyed when the next one is created */

static gmm_ckpt_plan *plan_make(int exports, const table_set *b, const gmm_gtp_item *items, int64_t count) {
    gmm_ckpt_report report = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    gmm_ckpt_plan_destroy(current_plan);
    current_plan = NULL;
    T_OK_TEXT((exports ? gmm_gtp_export : gmm_gtp_import)(&current_plan, &b->part, 1, items, count, NULL, &report),
              report.error.text);
    T_OK_TEXT(gmm_ckpt_verify(current_plan, NULL, 0, &e), e.text);
    return current_plan;
}

/* Applies the plan into poisoned memory. */
static char *plan_apply(gmm_ckpt_plan *plan, char *memory) {
    gmm_ckpt_cost cost = GMM_ZERO;
    gmm_ckpt_run run = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    int64_t cursor = 0;
    T_OK_TEXT(gmm_ckpt_cost_of(plan, &cost, &e), e.text);
    if (!memory) memory = (char *)memset(t_host((size_t)cost.target_bytes + 1), 0xA5, (size_t)cost.target_bytes + 1);
    run.memory = memory;
    T_OK_TEXT(gmm_ckpt_apply(plan, &run, &cursor, &e), e.text);
    return memory;
}
static const gmm_ckpt_tensor *target_of(const gmm_ckpt_plan *plan, int64_t i) {
    return gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), NULL) + i;
}

/* --------------------------------------------------------------------------------------------------- Resharding --- */

/* Adds the shards of all ranks of (tp, g) to one table. */
static int32_t hold_all(table_set *b, const kind *k, gmm_dtype dtype, int tp, int g, double pad, gmm_shard *shards,
                        gmm_gtp_stored *stored) {
    for (int r = 0; r < tp * g; r++) {
        char name[32];
        gmm_shard_plan p;
        shards[r] = shard_of(k, dtype, GMM_SCALING_NONE, tp, g, r);
        p = plan_of(&shards[r]);
        snprintf(name, sizeof name, "shard %d", r);
        memset(&stored[r], 0, sizeof stored[r]);
        stored[r].shard = &shards[r];
        stored[r].data = table_set_add(b, name, dtype, p.shard_rows, p.local_cols, shard_make(k, dtype, tp, g, r, pad));
        stored[r].scale = -1;
    }
    return (int32_t)(tp * g);
}

/* Shards of every TP and GTP size are imported into the one logical weight, whatever their
   padding holds; from it, and directly from shards of other sizes, shards of every size are made, equal to those of
   their ranks, with zeros as padding. */
static void reshard(int arg) {
    static const int sizes[] = {1, 2, 4, 8};
    const kind *k = &kinds[arg];
    for (int a = 0; a < 8; a++) {
        const int tp = 1 + a / 4, g = sizes[a % 4];
        gmm_shard shards[MOST], whole = shard_of(k, GMM_BF16, GMM_SCALING_NONE, 1, 1, 0);
        gmm_gtp_stored stored[MOST], one;
        gmm_gtp_item item = GMM_ZERO;
        gmm_ckpt_plan *plan;
        char *file;
        table_set *b = table_set_open(0), *f = table_set_open(1);
        item.name = "w";
        item.shard = &shards[tp * g - 1]; /* any rank serves */
        item.stored_count = hold_all(b, k, GMM_BF16, tp, g, 12345, shards, stored);
        item.stored = stored;
        plan = plan_make(1, b, &item, 1);
        T_CHECK(target_of(plan, 0)->shape[0] == k->rows && target_of(plan, 0)->shape[1] == k->cols, "logical extents");
        file = plan_apply(plan, NULL);
        for (int64_t i = 0; i < k->rows * k->cols; i++)
            T_CHECK(gmm_load(GMM_BF16, file, i) == value_at(k, i / k->cols, i % k->cols), "%s TP %d g %d: element %lld",
                    k->name, tp, g, (long long)i);
        memset(&one, 0, sizeof one);
        one.shard = &whole;
        one.data = table_set_add(f, "w", GMM_BF16, k->rows, k->cols, file);
        one.scale = -1;
        for (int c = 0; c < 8; c++)
            for (int r = 0; r < (1 + c / 4) * sizes[c % 4]; r++)
                for (int direct = 0; direct < 2; direct++) {
                    const gmm_shard want = shard_of(k, GMM_BF16, GMM_SCALING_NONE, 1 + c / 4, sizes[c % 4], r);
                    gmm_gtp_item to = GMM_ZERO;
                    to.name = "w";
                    to.shard = &want;
                    to.stored_count = direct ? item.stored_count : 1;
                    to.stored = direct ? stored : &one;
                    t_same("a shard", plan_apply(plan_make(0, direct ? b : f, &to, 1), NULL),
                           shard_make(k, GMM_BF16, 1 + c / 4, sizes[c % 4], r, 0),
                           (size_t)plan_of(&want).shard_data_bytes[0]);
                }
    }
    table_sets_close();
}

/* Every rank exports its own shard into one file, in any order: no two ranks write the same byte, and together they
   write all. Moments and main weights are fp32 arrays of the same shards, converted where the file has another
   dtype. */
static void each_alone(int arg) {
    const kind *k = &kinds[arg];
    const int tp = 2, g = 4;
    char *file = NULL;
    for (int n = 0; n < tp * g; n++) {
        const int r = n * 5 % (tp * g);
        const gmm_shard held = shard_of(k, GMM_F32, GMM_SCALING_NONE, tp, g, r),
                        in_file = shard_of(k, GMM_BF16, GMM_SCALING_NONE, tp, g, r);
        gmm_shard_plan p = plan_of(&held);
        gmm_gtp_stored stored = GMM_ZERO;
        gmm_gtp_item item = GMM_ZERO;
        gmm_ckpt_cost cost = GMM_ZERO;
        gmm_ckpt_plan *plan;
        table_set *b = table_set_open(0);
        float *values = (float *)shard_make(k, GMM_F32, tp, g, r, 777);
        void *before = memcpy(t_host((size_t)p.shard_data_bytes[0] + 1), values, (size_t)p.shard_data_bytes[0]);
        stored.shard = &held;
        stored.data = table_set_add(b, "mine", GMM_F32, p.shard_rows, p.local_cols, values);
        stored.scale = -1;
        item.name = "w";
        item.shard = &in_file;
        item.stored = &stored;
        item.stored_count = 1;
        plan = plan_make(1, b, &item, 1);
        T_OK_TEXT(gmm_ckpt_cost_of(plan, &cost, NULL), "");
        if (k->cut != GMM_TP_WHOLE || held.tp_rank == 0)
            T_CHECK(cost.bytes_written == 2 * p.valid_rows * p.local_cols, "%lld bytes", (long long)cost.bytes_written);
        file = plan_apply(plan, file);
        t_same("what was exported", before, values, (size_t)p.shard_data_bytes[0]);
    }
    for (int64_t i = 0; i < k->rows * k->cols; i++)
        T_CHECK(gmm_load(GMM_BF16, file, i) == value_at(k, i / k->cols, i % k->cols), "element %lld", (long long)i);
    table_sets_close();
}

/* ---------------------------------------------------------------------------------------------------- Quantized --- */

typedef struct format { gmm_dtype dtype; gmm_scaling scaling; int64_t cols; gmm_direction direction; } format;
static const format formats[] = {
    {GMM_E4M3, GMM_SCALING_128X128, 256, GMM_ROWWISE}, {GMM_E5M2, GMM_SCALING_128X128, 200, GMM_ROWWISE},
    {GMM_E4M3, GMM_SCALING_1X128, 384, GMM_ROWWISE}, {GMM_E4M3, GMM_SCALING_1X128, 256, GMM_COLUMNWISE},
    {GMM_E4M3, GMM_SCALING_MX32, 96, GMM_ROWWISE}, {GMM_E5M2, GMM_SCALING_MX32, 64, GMM_COLUMNWISE},
    {GMM_E2M1, GMM_SCALING_MX32, 64, GMM_ROWWISE}, {GMM_E2M1, GMM_SCALING_NV16, 96, GMM_ROWWISE},
    {GMM_E2M1, GMM_SCALING_NV16, 32, GMM_COLUMNWISE}, {GMM_E4M3, GMM_SCALING_TENSOR, 24, GMM_ROWWISE},
    {GMM_E4M3, GMM_SCALING_128X128, 384, GMM_COLUMNWISE}, {GMM_E2M1, GMM_SCALING_MX32, 96, GMM_COLUMNWISE},
    {GMM_E5M2, GMM_SCALING_TENSOR, 40, GMM_COLUMNWISE}};

/* Weights whose shard boundaries are multiples of 128 rows at every size; in the last one they are not. */
static const kind quantized[] = {
    {"whole", GMM_TP_WHOLE, 912, 0, {0}, 0, 0}, {"gated", GMM_TP_ROWS, 1024, 0, {512, 512}, 2, 0},
    {"row-parallel", GMM_TP_COLS, 304, 0, {0}, 0, 0}};

/* Rows and columns of the block that shares a scale. */
static void blocks_of(const format *f, int64_t *rows, int64_t *cols) {
    const int64_t n = f->scaling == GMM_SCALING_MX32 ? 32 : f->scaling == GMM_SCALING_NV16 ? 16 : 128;
    *rows = f->scaling == GMM_SCALING_128X128 || f->direction == GMM_COLUMNWISE ? n : 1;
    *cols = f->scaling == GMM_SCALING_128X128 || f->direction == GMM_ROWWISE ? n : 1;
}

/* The elements (part 0) or scales (1) of a shard in its storage layout; codes depend on the logical position. Padding
   holds the byte `pad`. Without `padded`, scales have no padding of their own. */
typedef struct array { gmm_dtype dtype; int64_t rows, cols; unsigned char *data; size_t bytes; } array;
static array render(const format *f, const kind *k, int part, int padded, int tp, int g, int rank, int pad) {
    const gmm_shard s = shard_of(k, f->dtype, f->scaling, tp, g, rank);
    const gmm_shard_plan p = plan_of(&s);
    const int bits = part ? (f->scaling == GMM_SCALING_1X128 || f->scaling == GMM_SCALING_128X128 ||
                             f->scaling == GMM_SCALING_TENSOR ? 32 : 8) : (int)gmm_dtype_bits(f->dtype);
    int64_t per_row = 1, per_col = 1, h, w;
    int by_rows;
    array a;
    if (part) blocks_of(f, &per_row, &per_col);
    if (part && f->scaling == GMM_SCALING_TENSOR) { per_row = p.shard_rows; per_col = p.local_cols; }
    by_rows = part ? f->scaling == GMM_SCALING_MX32 ||
                         (f->scaling == GMM_SCALING_1X128) == (f->direction == GMM_COLUMNWISE)
                   : f->direction == GMM_ROWWISE || f->scaling == GMM_SCALING_MX32;
    h = (p.shard_rows + per_row - 1) / per_row;
    w = (p.local_cols + per_col - 1) / per_col;
    a.rows = by_rows ? h : w;
    a.cols = by_rows ? w : h;
    if (part && padded && f->scaling != GMM_SCALING_TENSOR) {
        const int along_rows = f->scaling == GMM_SCALING_MX32 && f->direction == GMM_COLUMNWISE;
        a.cols = up(a.cols, along_rows ? 128 : 4);
        if (along_rows) a.rows = up(a.rows, 4);
        else if (f->scaling == GMM_SCALING_MX32 || f->scaling == GMM_SCALING_NV16) a.rows = up(a.rows, 128);
    }
    a.dtype = !part ? f->dtype : bits == 32 ? GMM_F32 : f->scaling == GMM_SCALING_NV16 ? GMM_E4M3 : GMM_E8M0;
    a.bytes = (size_t)(a.rows * a.cols * bits / 8);
    a.data = (unsigned char *)memset(t_host(a.bytes), pad, a.bytes);
    for (int64_t i = 0; i < (p.valid_rows + per_row - 1) / per_row; i++)
        for (int64_t j = 0; j < w; j++) {
            const int64_t row = logical_row(k, tp, s.tp_rank, p.row0 + i * per_row) / per_row;
            const int64_t col = (p.col0 + j * per_col) / per_col, at = by_rows ? i * a.cols + j : j * a.cols + i;
            const int one = f->scaling == GMM_SCALING_TENSOR && part;
            const uint64_t code = one ? 0x3F800000u : mix((uint64_t)(row * 8192 + col * 2 + part));
            if (bits == 4)
                a.data[at / 2] = (unsigned char)((a.data[at / 2] & (at % 2 ? 15 : 240)) | (code & 15) << (at % 2 * 4));
            else memcpy(a.data + at * bits / 8, &code, (size_t)bits / 8);
        }
    return a;
}

/* The argument of a case of import_quantized: a row of each table. */
static int import_arg(int weight, int format) { return weight * (int)T_COUNT(formats) + format; }
static const kind *import_kind(int arg) { return &quantized[arg / T_COUNT(formats)]; }
static const format *import_format(int arg) { return &formats[arg % T_COUNT(formats)]; }

/* Elements and scales of every format are copied as bytes between shards of every size and the logical weight;
   padding is not copied. */
static void import_quantized(int arg) {
    static const int sizes[] = {1, 2, 4};
    const format *f = import_format(arg);
    kind k = *import_kind(arg);
    k.cols = f->cols;
    if (k.cut == GMM_TP_COLS) k.cols = f->cols / 2 % 128 ? up(f->cols, 256) : f->cols;
    for (int a = 0; a < 6; a++) {
        const int tp = 1 + a / 3, g = sizes[a % 3];
        gmm_shard shards[MOST], whole = shard_of(&k, f->dtype, f->scaling, 1, 1, 0);
        gmm_gtp_stored stored[MOST], one;
        gmm_gtp_item item = GMM_ZERO;
        gmm_ckpt_plan *plan;
        array parts[2];
        char *file;
        table_set *b = table_set_open(0), *file_book = table_set_open(1);
        for (int r = 0; r < tp * g; r++) {
            memset(&stored[r], 0, sizeof stored[r]);
            shards[r] = shard_of(&k, f->dtype, f->scaling, tp, g, r);
            stored[r].shard = &shards[r];
            for (int part = 0; part < 2; part++) {
                char name[32];
                const array x = render(f, &k, part, 1, tp, g, r, 0xEE);
                snprintf(name, sizeof name, "%d.%d", r, part);
                *(part ? &stored[r].scale : &stored[r].data) = table_set_add(b, name, x.dtype, x.rows, x.cols, x.data);
            }
        }
        item.name = "w";
        item.scale_name = "w_scale";
        item.shard = &whole;
        item.direction = f->direction;
        item.stored = stored;
        item.stored_count = (int32_t)(tp * g);
        plan = plan_make(1, b, &item, 1);
        file = plan_apply(plan, NULL);
        memset(&one, 0, sizeof one);
        for (int part = 0; part < 2; part++) {
            const gmm_ckpt_tensor *t = target_of(plan, part);
            parts[part] = render(f, &k, part, 0, 1, 1, 0, 0);
            T_CHECK(t->shape[0] == parts[part].rows && t->shape[1] == parts[part].cols, "%lld x %lld",
                    (long long)t->shape[0], (long long)t->shape[1]);
            t_same(part ? "scales" : "elements", file + t->offset, parts[part].data, parts[part].bytes);
            *(part ? &one.scale : &one.data) = table_set_add(file_book, part ? "w_scale" : "w", parts[part].dtype,
                                                             parts[part].rows, parts[part].cols, parts[part].data);
        }
        one.shard = &whole;
        for (int c = 0; c < 6; c++)
            for (int r = 0; r < (1 + c / 3) * sizes[c % 3]; r++)
                for (int direct = 0; direct < 2; direct++) {
                    const gmm_shard want = shard_of(&k, f->dtype, f->scaling, 1 + c / 3, sizes[c % 3], r);
                    gmm_gtp_item to = item;
                    to.shard = &want;
                    to.stored_count = direct ? item.stored_count : 1;
                    to.stored = direct ? stored : &one;
                    plan = plan_make(0, direct ? b : file_book, &to, 1);
                    file = plan_apply(plan, NULL);
                    for (int part = 0; part < 2; part++) {
                        const array x = render(f, &k, part, 1, 1 + c / 3, sizes[c % 3], r, 0);
                        const gmm_ckpt_tensor *t = target_of(plan, part);
                        T_CHECK(t->bytes == (int64_t)x.bytes && t->dtype == x.dtype, "%lld bytes", (long long)t->bytes);
                        t_same(part ? "scales of a shard" : "elements of a shard", file + t->offset, x.data, x.bytes);
                    }
                }
    }
    table_sets_close();
}

/* Dequantized: a shard that would cut a scale block is refused as quantized bytes, and is imported as 16-bit
   values: each is its code times the scale of its block, rounded once. */
static void import_floats(int arg) {
    static const float scales[] = {0.5f, 3, 0.001f, 1e4f, 1, 7};
    const kind k = {"cut", GMM_TP_ROWS, 200, 150, {120, 80}, 2, 8};
    gmm_shard whole = shard_of(&k, GMM_E4M3, GMM_SCALING_128X128, 1, 1, 0);
    gmm_gtp_stored one = GMM_ZERO;
    gmm_gtp_item item = GMM_ZERO;
    gmm_ckpt_report report = GMM_ZERO;
    unsigned char *codes = (unsigned char *)t_host(200 * 150);
    float *grid = (float *)t_host(4 * sizeof *grid);
    table_set *b = table_set_open(0);
    for (int i = 0; i < 200 * 150; i++) codes[i] = (unsigned char)(mix((uint64_t)i) % 127 | (i % 2 << 7));
    for (int i = 0; i < 4; i++) grid[i] = scales[i + arg];
    one.shard = &whole;
    one.data = table_set_add(b, "w", GMM_E4M3, 200, 150, codes);
    one.scale = table_set_add(b, "w_scale_inv", GMM_F32, 2, 2, grid);
    item.name = "w";
    item.stored = &one;
    item.stored_count = 1;
    for (int r = 0; r < 8; r++) {
        gmm_shard want = shard_of(&k, arg ? GMM_BF16 : GMM_F32, GMM_SCALING_NONE, 2, 4, r);
        gmm_shard_plan p;
        const char *got;
        gmm_ckpt_plan *refused = (gmm_ckpt_plan *)(void *)&report;
        whole.unit = want.unit = 0;
        p = plan_of(&want);
        if (r == 0) { /* the slices of TP 2 cut scale blocks */
            gmm_shard cut = want;
            cut.dtype = GMM_E4M3;
            cut.scaling = GMM_SCALING_128X128;
            item.shard = &cut;
            item.scale_name = "s";
            T_REFUSED_TEXT(GMM_E_CONFIG, gmm_gtp_import(&refused, &b->part, 1, &item, 1, NULL, &report),
                           report.error.text, "gmm_gtp_import", "\"w\"", "blocks of 128", "16 bits", NULL);
            T_CHECK(!refused && report.reason == GMM_CKPT_NOT_DIVISIBLE && !strcmp(report.key, "w"), "report");
            item.scale_name = NULL;
        }
        item.shard = &want;
        got = plan_apply(plan_make(0, b, &item, 1), NULL);
        for (int64_t i = 0; i < p.shard_rows; i++)
            for (int64_t j = 0; j < 150; j++) {
                const int64_t row = logical_row(&k, 2, want.tp_rank, p.row0 + i);
                const float v = row < 0 ? 0 : gmm_e4m3_to_f32(codes[row * 150 + j]) * grid[row / 128 * 2 + j / 128];
                T_CHECK(gmm_load(want.dtype, got, i * 150 + j) == (arg ? gmm_bf16_to_f32(gmm_f32_to_bf16(v)) : v),
                        "rank %d row %lld column %lld", r, (long long)i, (long long)j);
            }
    }
    table_sets_close();
}

/* ------------------------------------------------------------------------------------------ Through the runtime --- */

/* A rank with one weight, "fc1", cut among all ranks. */
typedef struct weight_rank {
    gmm_context *ctx;
    gmm_runtime rt;
    gmm_stream stream;
    gmm_gtp *gtp;
    gmm_gtp_view view, grad;
    gmm_shard desc;
    gmm_shard_plan plan;
    uint16_t *shard;
} weight_rank;

#define GTP(r, call) T_OK_TEXT(call, gmm_gtp_last_error((r)->gtp))

/* Declares and binds the weight. Its shard is zeros until one is loaded. */
static void declare_weight(weight_rank *r, gmm_ranks *ranks, int rank, const gmm_comm *comm) {
    gmm_gtp_config config = GMM_ZERO;
    gmm_gtp_domain domain = GMM_ZERO;
    gmm_gtp_weight w = GMM_ZERO;
    gmm_gtp_need need = GMM_ZERO;
    gmm_config one = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    int32_t id;
    size_t bytes;
    one.threads = 1;
    T_OK_TEXT(gmm_create(&r->ctx, &one, &e), e.text);
    T_OK_TEXT(gmm_ranks_runtime(ranks, rank, &r->rt), "");
    T_OK_TEXT(r->rt.stream_create(r->rt.self, 0, &r->stream), "");
    T_OK_TEXT(r->rt.stream_create(r->rt.self, 0, &domain.gather_stream), "");
    domain.reduce_stream = domain.gather_stream;
    domain.gather = comm;
    config.weights = config.bundles = 1;
    config.ctx = r->ctx;
    config.runtime = &r->rt;
    T_OK_TEXT(gmm_gtp_query(&config, &bytes, &e), e.text);
    T_OK_TEXT(gmm_gtp_init(t_alloc_aligned(bytes, 256), bytes, &config, &r->gtp, &e), e.text);
    GTP(r, gmm_gtp_add_domain(r->gtp, &domain, &id));
    r->shard = (uint16_t *)t_alloc_aligned((size_t)r->plan.shard_data_bytes[0], 256);
    memset(r->shard, 0, (size_t)r->plan.shard_data_bytes[0]);
    w.name = "fc1";
    w.shard = &r->desc;
    w.data[0] = r->shard;
    w.main_grad = t_alloc_aligned((size_t)(r->plan.shard_rows * r->plan.local_cols) * 4, 256);
    w.main_grad_dtype = GMM_F32;
    GTP(r, gmm_gtp_add_weight(r->gtp, &w, &id));
    GTP(r, gmm_gtp_add_bundle(r->gtp, 0, &id, 1, "fc1", &id));
    GTP(r, gmm_gtp_seal(r->gtp));
    T_OK_TEXT(gmm_gtp_memory_need(r->gtp, 0, &need), "");
    GTP(r, gmm_gtp_bind(r->gtp, 0, need.gather_bytes ? t_alloc_aligned(need.gather_bytes, 256) : NULL,
                        need.gather_bytes, t_alloc_aligned(need.reduce_bytes, 256), need.reduce_bytes));
}

/* Loads the shard from the file of an earlier export, or without one from shards of 4 ranks of TP 2; publishes it. */
static void load_shard(weight_rank *r, const kind *k, char *file) {
    gmm_shard shards[MOST], whole = shard_of(k, GMM_BF16, GMM_SCALING_NONE, 1, 1, 0);
    gmm_gtp_stored stored[MOST], one = GMM_ZERO;
    gmm_gtp_item item = GMM_ZERO;
    table_set *b = table_set_open(0);
    const int32_t weight = 0;
    gmm_ckpt_plan *plan;
    item.name = "fc1";
    item.shard = &r->desc;
    item.stored_count = file ? 1 : hold_all(b, k, GMM_BF16, 2, 2, 99, shards, stored);
    item.stored = file ? &one : stored;
    one.shard = &whole;
    one.scale = -1;
    if (file) one.data = table_set_add(b, "fc1", GMM_BF16, k->rows, k->cols, file);
    plan = plan_make(0, b, &item, 1);
    memset(r->shard, 0xA5, (size_t)r->plan.shard_data_bytes[0]);
    memcpy(r->shard, plan_apply(plan, NULL), (size_t)r->plan.shard_data_bytes[0]);
    GTP(r, gmm_gtp_publish(r->gtp, &weight, 1, r->stream));
}

/* Adds the shard to a file, or begins one. */
static char *export_shard(const weight_rank *r, char *file) {
    gmm_gtp_stored stored = GMM_ZERO;
    gmm_gtp_item item = GMM_ZERO;
    table_set *b = table_set_open(1);
    stored.shard = &r->desc;
    stored.data = table_set_add(b, "mine", GMM_BF16, r->plan.shard_rows, r->plan.local_cols, r->shard);
    stored.scale = -1;
    item.name = "fc1";
    item.shard = &r->desc;
    item.stored = &stored;
    item.stored_count = 1;
    return plan_apply(plan_make(1, b, &item, 1), file);
}

/* The gathered weight and the file have the expected values; then the step ends. */
static void end_step(weight_rank *r, const kind *k, const char *file, int64_t version) {
    const uint16_t *w = (const uint16_t *)r->view.mat.data;
    gmm_gtp_gradient none = GMM_ZERO;
    for (int64_t at = 0; at < k->rows * k->cols; at++) {
        T_CHECK(gmm_bf16_to_f32(w[at]) == value_at(k, at / k->cols, at % k->cols), "version %lld element %lld",
                (long long)version, (long long)at);
        T_CHECK(((const uint16_t *)(const void *)file)[at] == w[at], "the file");
    }
    T_CHECK(r->view.version == version, "version %lld", (long long)r->view.version);
    GTP(r, gmm_gtp_release(r->gtp, 0, GMM_GTP_FORWARD, r->stream));
    T_OK_TEXT(r->rt.fill(r->rt.self, r->grad.mat.data, 0, (size_t)(k->rows * k->cols) * 4, r->stream), "");
    none.scale = 1;
    GTP(r, gmm_gtp_submit(r->gtp, 0, &none, r->stream));
    GTP(r, gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->stream));
}

/* Shards of another GTP size are loaded and published, and every rank gathers the weight. An
   export in the middle of a step, while views are held and a gradient is open, changes nothing and loads again. */
static void through_runtime(int g) {
    static const int32_t all[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const kind *k = &kinds[3];
    gmm_ranks *ranks = NULL;
    gmm_ranks_config world = GMM_ZERO;
    gmm_comm comm[8];
    weight_rank ranks_of[8], *r;
    gmm_error e = GMM_ZERO;
    const char *race = "";
    char *file = NULL;
    memset(ranks_of, 0, sizeof ranks_of);
    T_CHECK(k->cut == GMM_TP_ROWS, "the gated weight");
    world.ranks = g;
    world.check_races = 1;
    world.seed = 7;
    T_OK_TEXT(gmm_ranks_create(&world, &ranks, &e), e.text);
    T_OK_TEXT(gmm_ranks_comms(ranks, all, g, comm), "");
    for (int i = 0; i < g; i++) {
        r = &ranks_of[i];
        r->desc = shard_of(k, GMM_BF16, GMM_SCALING_NONE, 1, g, i);
        r->plan = plan_of(&r->desc);
        declare_weight(r, ranks, i, &comm[i]);
    }
    for (int round = 0; round < 3; round++) { /* the last one only reads */
        for (int i = 0; i < g && round < 2; i++) load_shard(&ranks_of[i], k, file);
        for (int i = 0; i < g; i++) {
            r = &ranks_of[i];
            memset(&r->view, 0, sizeof r->view);
            memset(&r->grad, 0, sizeof r->grad);
            GTP(r, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->stream, &r->view));
            GTP(r, gmm_gtp_wgrad(r->gtp, 0, r->stream, &r->grad));
        }
        for (int i = 0; i < g; i++) file = export_shard(&ranks_of[i], i ? file : NULL);
        T_OK_TEXT(gmm_ranks_run(ranks), gmm_ranks_error(ranks, 0));
        for (int i = 0; i < g; i++) end_step(&ranks_of[i], k, file, round ? 2 : 1);
    }
    T_OK_TEXT(gmm_ranks_run(ranks), gmm_ranks_error(ranks, 0));
    T_CHECK(gmm_ranks_races(ranks, &race) == 0, "%s", race);
    for (int i = 0; i < g; i++) T_OK_TEXT(gmm_gtp_fini(ranks_of[i].gtp), "");
    gmm_ranks_destroy(ranks);
    for (int i = 0; i < g; i++) gmm_destroy(ranks_of[i].ctx);
    table_sets_close();
}
#undef GTP

/* ------------------------------------------------------------------------------------------------------- Errors --- */

typedef struct counter { long live, calls, fail; } counter;
static void *counted_alloc(void *user, size_t bytes) {
    counter *c = (counter *)user;
    void *p;
    if (++c->calls == c->fail) return NULL;
    p = malloc(bytes);
    c->live += p != NULL;
    return p;
}
static void counted_release(void *user, void *memory) {
    ((counter *)user)->live -= memory != NULL;
    free(memory);
}

/* Each error is found while planning; the message names the item and the rule. No plan is created, and no memory
   leaks. */
static void refusals(int arg) {
    const kind *k = &kinds[3];
    gmm_shard shards[MOST], want = shard_of(k, GMM_BF16, GMM_SCALING_NONE, 2, 2, 3), other, quantized_want;
    gmm_gtp_stored stored[MOST], saved;
    gmm_gtp_item item = GMM_ZERO, two[2];
    gmm_ckpt_report report = GMM_ZERO;
    gmm_ckpt_plan *plan = NULL;
    static const int64_t moved[2] = {64, 56};
    counter c = {0, 0, 0};
    gmm_allocator allocator = GMM_ZERO;
    gmm_ckpt_part nothing = GMM_ZERO;
    table_set *b = table_set_open(0);
    (void)arg;
    allocator.user = &c;
    allocator.alloc = counted_alloc;
    allocator.release = counted_release;
    item.name = "layer.fc1";
    item.shard = &want;
    item.stored_count = hold_all(b, k, GMM_BF16, 1, 4, 0, shards, stored);
    item.stored = stored;
#define IMPORT() gmm_gtp_import(&plan, &b->part, 1, &item, 1, &allocator, &report)
#define REFUSED(status, why, ...) do { \
        plan = (gmm_ckpt_plan *)(void *)&c; \
        T_REFUSED_TEXT(status, IMPORT(), report.error.text, "gmm_gtp_import", __VA_ARGS__, NULL); \
        T_CHECK(!plan && c.live == 0 && report.reason == why, "%s, %ld blocks left", \
                gmm_ckpt_reason_name(report.reason), c.live); } while (0)
    T_OK_TEXT(IMPORT(), report.error.text);
    gmm_ckpt_plan_destroy(plan);
    T_CHECK(c.live == 0 && c.calls > 3, "%ld blocks left", c.live);
    {
        const long calls = c.calls;
        for (c.fail = 1; c.fail <= calls; c.fail++) { /* every allocation fails in turn */
            c.calls = 0;
            T_CHECK(IMPORT() == GMM_E_MEMORY && !plan && c.live == 0, "allocation %ld", c.fail);
        }
        c.fail = 0;
    }
    item.stored_count = 3;
    REFUSED(GMM_E_KEY, GMM_CKPT_MISSING_INDEX, "\"layer.fc1\"", "a rank's part is missing");
    item.stored_count = 4;
    saved = stored[2];
    stored[2] = stored[3]; /* one part twice does not replace the missing one */
    REFUSED(GMM_E_KEY, GMM_CKPT_MISSING_INDEX, "a rank's part is missing");
    stored[2] = saved;
    saved = stored[1];
    stored[1].data = stored[3].data + 1;
    REFUSED(GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[1].data is 4", "4 tensors");
    stored[1].data = saved.data;
    stored[1].part = 1;
    REFUSED(GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[1]: part 1 of 1");
    stored[1].part = 0;
    stored[1].shard = NULL;
    REFUSED(GMM_E_NULL, GMM_CKPT_ARGUMENT, "stored[1].shard is NULL");
    stored[1].shard = saved.shard;
    other = shards[1];
    other.gtp_size = 2;
    stored[1].shard = &other;
    REFUSED(GMM_E_KEY, GMM_CKPT_SHAPE, "stored[1]", "shard 1 of 2");
    other = shards[1];
    other.section_rows = moved; /* a gate section of 64 rows in a weight of the same size */
    REFUSED(GMM_E_KEY, GMM_CKPT_SHAPE, "stored[1] is of a weight of 120 x 4");
    other = shards[1];
    other.dtype = GMM_F32;
    REFUSED(GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[1]", "is bf16, its shard f32");
    other = shards[1];
    other.gtp_rank = 4;
    REFUSED(GMM_E_ARG, GMM_CKPT_ARGUMENT, "gtp_rank 4 of gtp_size 4");
    other = shards[1];
    other.rows = 128;
    REFUSED(GMM_E_ARG, GMM_CKPT_ARGUMENT, "add up");
    stored[1] = saved;
    want.tp_rank = 2;
    REFUSED(GMM_E_ARG, GMM_CKPT_ARGUMENT, "tp_rank 2 of tp_size 2");
    want.tp_rank = 1;
    want.dtype = GMM_I32;
    REFUSED(GMM_E_DTYPE, GMM_CKPT_ARGUMENT, "\"layer.fc1\"");
    want.dtype = GMM_BF16;
    quantized_want = shard_of(k, GMM_E4M3, GMM_SCALING_128X128, 2, 2, 3);
    quantized_want.unit = 0;
    item.shard = &quantized_want;
    REFUSED(GMM_E_ARG, GMM_CKPT_ARGUMENT, "scale_name is NULL");
    item.scale_name = "scales";
    REFUSED(GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[0] is bf16 none, which does not become e4m3 128x128");
    item.shard = &want;
    REFUSED(GMM_E_ARG, GMM_CKPT_ARGUMENT, "scale_name is given");
    item.scale_name = NULL;
    item.name = NULL;
    REFUSED(GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[0]");
    item.name = "layer.fc1";
    item.shard = NULL;
    REFUSED(GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[0]");
    item.shard = &want;
    two[0] = two[1] = item;
    plan = (gmm_ckpt_plan *)(void *)&c;
    T_REFUSED_TEXT(GMM_E_KEY, gmm_gtp_import(&plan, &b->part, 1, two, 2, &allocator, &report), report.error.text,
                   "gmm_gtp_import: \"layer.fc1\"", "taken already", NULL);
    T_CHECK(!plan && c.live == 0, "%ld blocks left", c.live);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_export(NULL, &b->part, 1, &item, 1, NULL, &report), report.error.text,
                   "gmm_gtp_export", "out", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_export(&plan, &nothing, 1, &item, 1, NULL, &report), report.error.text,
                   "parts[0].table", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_gtp_export(&plan, &b->part, 0, &item, 1, NULL, &report), report.error.text,
                   "part_count 0", NULL);
#undef REFUSED
#undef IMPORT
    table_sets_close();
}

/* Moves written by the caller are checked like those of a plan: they must be complete unless marked as partial. */
static void caller_moves(int arg) {
    table_set *b = table_set_open(0);
    float values[6] = {1, 2, 3, 4, 5, 6};
    const float want[6] = {1, 4, 2, 5, 3, 6};
    gmm_ckpt_tensor t = GMM_ZERO;
    gmm_ckpt_move m = GMM_ZERO, twice[2];
    gmm_ckpt_report report = GMM_ZERO;
    (void)arg;
    gmm_ckpt_plan_destroy(current_plan);
    current_plan = NULL;
    t.name = "turned";
    t.dtype = GMM_F32;
    t.rank = 2;
    t.shape[0] = 3;
    t.shape[1] = 2;
    m.kind = GMM_CKPT_COPY;
    m.src = table_set_add(b, "x", GMM_F32, 2, 3, values);
    m.scale = -1;
    m.loops = 2;
    m.count[0] = 2; /* loops in the order of the source, although plans order them by the target */
    m.count[1] = 3;
    m.src_step[0] = 3;
    m.src_step[1] = 1;
    m.dst_step[0] = 1;
    m.dst_step[1] = 2;
#define PLAN(moves, count, partial) \
    gmm_ckpt_plan_of_moves(&current_plan, &b->part, 1, &t, 1, moves, count, partial, NULL, &report)
    T_OK_TEXT(PLAN(&m, 1, 0), report.error.text);
    t_same("turned", plan_apply(current_plan, NULL), want, sizeof want);
    gmm_ckpt_plan_destroy(current_plan);
    twice[0] = twice[1] = m;
    T_REFUSED_TEXT(GMM_E_STATE, PLAN(twice, 2, 1), report.error.text, "gmm_ckpt_plan_of_moves", "turned", NULL);
    m.count[1] = 2;
    T_REFUSED_TEXT(GMM_E_STATE, PLAN(&m, 1, 0), report.error.text, "4 of its 6", NULL);
    T_OK_TEXT(PLAN(&m, 1, 1), report.error.text);
    gmm_ckpt_plan_destroy(current_plan);
    m.count[1] = 4;
    T_REFUSED_TEXT(GMM_E_STATE, PLAN(&m, 1, 1), report.error.text, "past the target's end", NULL);
    m.count[1] = 3;
    m.src = 7;
    T_REFUSED_TEXT(GMM_E_STATE, PLAN(&m, 1, 1), report.error.text, "no such source", NULL);
    m.src = 0;
    m.loops = 9;
    T_REFUSED_TEXT(GMM_E_STATE, PLAN(&m, 1, 1), report.error.text, "loops", NULL);
    m.loops = 2;
    m.kind = GMM_CKPT_VIEW;
    T_REFUSED_TEXT(GMM_E_STATE, PLAN(&m, 1, 1), report.error.text, "view", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, PLAN(&m, 1, 2), report.error.text, "partial 2", NULL);
    t.dtype = GMM_NONE;
    T_REFUSED_TEXT(GMM_E_ARG, PLAN(&m, 0, 1), report.error.text, "targets[0]", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_ckpt_plan_of_moves(&current_plan, NULL, 1, &t, 1, &m, 1, 0, NULL, &report),
                   report.error.text, "parts", NULL);
#undef PLAN
    current_plan = NULL;
    table_sets_close();
}

void tests_gtp_checkpoint(void) {
    for (int i = 0; i < (int)T_COUNT(kinds); i++)
        t_add_host(reshard, i, "gtp checkpoint reshard %s", kinds[i].name);
    for (int i = 0; i < (int)T_COUNT(kinds); i++)
        t_add_host(each_alone, i, "gtp checkpoint each rank exports its own, %s", kinds[i].name);
    for (int n = 0; n < (int)T_COUNT(quantized); n++)
        for (int i = 0; i < (int)T_COUNT(formats); i++)
            t_add_host(import_quantized, import_arg(n, i), "gtp checkpoint quantized import %s %s %s, %s",
                       gmm_dtype_name(formats[i].dtype), gmm_scaling_name(formats[i].scaling),
                       formats[i].direction ? "columnwise" : "rowwise", quantized[n].name);
    for (int i = 0; i < 2; i++)
        t_add_host(import_floats, i, "gtp checkpoint what cuts blocks, into %s", i ? "bf16" : "f32");
    for (int i = 2; i <= 8; i *= 2)
        t_add_host(through_runtime, i, "gtp checkpoint within a step, g=%d", i);
    t_add_host(refusals, 0, "gtp checkpoint errors");
    t_add_host(caller_moves, 0, "gtp checkpoint plans of moves of the caller");
}
