/* test_gtp.c - shard plans, extents, process grids, memory */
#include "test.h"

#include "gmm_gtp.h"

#include <math.h>
#include <string.h>

static gmm_shard weight(int64_t rows, int64_t cols, int32_t g, int32_t rank, int64_t unit) {
    gmm_shard s = GMM_ZERO;
    s.dtype = GMM_BF16;
    s.rows = rows;
    s.cols = cols;
    s.gtp_size = g;
    s.gtp_rank = rank;
    s.unit = unit;
    return s;
}

static gmm_shard_plan plan_of(const gmm_shard *s) {
    gmm_shard_plan p = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    T_OK_TEXT(gmm_gtp_plan(s, &p, &e), e.text);
    return p;
}

/* ----------------------------------------------------------------------------------------------- Worked plans --- */

typedef struct worked { int64_t n, unit; int32_t g; int64_t pad, rows; } worked;

static void even_plan(int arg) {
    static const worked aligned[] = {{2688, 16, 8, 0, 336}, {4096, 16, 8, 0, 512}};
    static const worked padded[] = {{2688, 32, 8, 128, 352}, {2688, 128, 8, 384, 384}, {1160, 16, 4, 56, 304},
                                    {120, 32, 4, 8, 32}};
    const worked *w = arg == 1 ? aligned : padded;
    const int64_t count = arg == 1 ? T_COUNT(aligned) : T_COUNT(padded);
    for (int64_t i = 0; i < count; i++)
        for (int32_t r = 0; r < w[i].g; r++) {
            gmm_shard s = weight(w[i].n, 64, w[i].g, r, w[i].unit);
            gmm_shard_plan p = plan_of(&s);
            T_CHECK(p.pad == w[i].pad && p.shard_rows == w[i].rows, "%lld rows: pad %lld, %lld a rank",
                    (long long)w[i].n, (long long)p.pad, (long long)p.shard_rows);
            T_CHECK(p.padded_rows == w[i].n + w[i].pad && p.local_rows == w[i].n && p.unit == w[i].unit, "i %lld",
                    (long long)i);
            T_CHECK(p.row0 == r * w[i].rows, "row0 %lld", (long long)p.row0);
            T_CHECK(p.shard_data_bytes[GMM_ROWWISE] == w[i].rows * 64 * 2, "bytes");
        }
}

/* Padding may be larger than a shard: the last ranks then hold nothing but padding. */
static void all_padding(int arg) {
    static const int64_t valid[4] = {8, 0, 0, 0};
    (void)arg;
    for (int32_t r = 0; r < 4; r++) {
        gmm_shard s = weight(8, 4, 4, r, 16);
        gmm_shard_plan p = plan_of(&s);
        int32_t n = -1;
        gmm_extent x[2];
        T_CHECK(p.valid_rows == valid[r] && p.pad == 56 && p.shard_rows == 16, "rank %d: %lld", (int)r,
                (long long)p.valid_rows);
        T_OK_TEXT(gmm_gtp_extents(&s, x, 2, &n, NULL), "");
        T_CHECK(n == (r == 0), "rank %d has %d extents", (int)r, (int)n);
    }
}

static void per_slice(int arg) {
    (void)arg;
    for (int32_t t = 0; t < 2; t++)
        for (int32_t r = 0; r < 2; r++) {
            gmm_shard s = weight(192, 8, 2, r, 32);
            gmm_shard_plan p;
            s.tp_cut = GMM_TP_ROWS;
            s.tp_size = 2;
            s.tp_rank = t;
            p = plan_of(&s);
            T_CHECK(p.shard_rows == 64 && p.pad == 32 && p.local_rows == 96, "%lld rows a rank",
                    (long long)p.shard_rows);
            s.tp_cut = GMM_TP_COLS; /* row-parallel: all rows, half the columns */
            p = plan_of(&s);
            T_CHECK(p.shard_rows == 96 && p.pad == 0 && p.local_cols == 4 && p.col0 == 4 * t, "row-parallel");
        }
}

static void unpadded(int arg) {
    gmm_shard s = weight(2688, 64, 5, 0, GMM_GTP_UNPADDED);
    gmm_shard_plan p = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    (void)arg;
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_gtp_plan(&s, &p, &e), e.text, "gmm_gtp_plan", "gtp_size 5", "2688", NULL);
    s.gtp_size = 7;
    p = plan_of(&s);
    T_CHECK(p.pad == 0 && p.shard_rows == 384 && p.unit == 0, "divisible rows need no padding");
}

static void units(int arg) {
    (void)arg;
    T_CHECK(gmm_gtp_unit(GMM_SCALING_NONE) == 16 && gmm_gtp_unit(GMM_SCALING_TENSOR) == 16, "16");
    T_CHECK(gmm_gtp_unit(GMM_SCALING_1X128) == 128 && gmm_gtp_unit(GMM_SCALING_128X128) == 128, "128");
    T_CHECK(gmm_gtp_unit(GMM_SCALING_MX32) == 32 && gmm_gtp_unit(GMM_SCALING_NV16) == 16, "32, 16");
    T_CHECK(gmm_gtp_unit(GMM_SCALING_ROW) == 0 && gmm_gtp_unit((gmm_scaling)99) == 0, "not sharded");
    T_CHECK(gmm_gtp_recipe_unit(GMM_RECIPE_NONE) == 16 && gmm_gtp_recipe_unit(GMM_RECIPE_FP8_DELAYED) == 16, "16");
    T_CHECK(gmm_gtp_recipe_unit(GMM_RECIPE_FP8_CURRENT) == 16 && gmm_gtp_recipe_unit(GMM_RECIPE_FP8_BLOCK) == 128, "");
    T_CHECK(gmm_gtp_recipe_unit(GMM_RECIPE_MXFP8) == 32 && gmm_gtp_recipe_unit(GMM_RECIPE_NVFP4) == 16, "32, 16");
    T_CHECK(gmm_gtp_recipe_unit((gmm_recipe_kind)99) == 0, "unknown");
    {   /* the row alignment of the format, and a GTP size of 1, which pads nothing */
        gmm_shard s = weight(1000, 256, 2, 1, 0);
        T_CHECK(plan_of(&s).pad == 24, "bf16");
        s.dtype = GMM_E4M3;
        s.scaling = GMM_SCALING_128X128;
        T_CHECK(plan_of(&s).pad == 24 && plan_of(&s).unit == 128, "128x128");
        s.gtp_size = 1;
        s.gtp_rank = 0;
        T_CHECK(plan_of(&s).pad == 0 && plan_of(&s).shard_rows == 1000 && plan_of(&s).valid_rows == 1000, "one rank");
    }
}

/* Bytes of shards and gathered operands against counts by hand: 512 x 384 over 2 ranks. */
static void bytes(int arg) {
    typedef struct row {
        gmm_dtype dtype;
        gmm_scaling scaling;
        int64_t shard[2], scale[2], gather[2], gather_scale[2];
    } row;
    static const row table[] = {
        {GMM_F32, GMM_SCALING_NONE, {393216, 0}, {0, 0}, {786432, 0}, {0, 0}},
        {GMM_BF16, GMM_SCALING_NONE, {196608, 0}, {0, 0}, {393216, 0}, {0, 0}},
        {GMM_E4M3, GMM_SCALING_TENSOR, {98304, 0}, {4, 0}, {196608, 196608}, {4, 4}},
        {GMM_E4M3, GMM_SCALING_128X128, {98304, 0}, {2 * 4 * 4, 0}, {196608, 196608}, {4 * 4 * 4, 3 * 4 * 4}},
        {GMM_E4M3, GMM_SCALING_1X128, {98304, 98304}, {3 * 256 * 4, 2 * 384 * 4}, {196608, 196608},
         {3 * 512 * 4, 4 * 384 * 4}},
        {GMM_E4M3, GMM_SCALING_MX32, {98304, 98304}, {256 * 12, 8 * 384}, {196608, 196608}, {512 * 12, 16 * 384}},
        {GMM_E2M1, GMM_SCALING_NV16, {49152, 49152}, {256 * 24, 384 * 16}, {98304, 98304}, {512 * 24, 384 * 32}}};
    (void)arg;
    for (int64_t i = 0; i < T_COUNT(table); i++) {
        gmm_shard s = weight(512, 384, 2, 1, 0);
        gmm_shard_plan p;
        s.dtype = table[i].dtype;
        s.scaling = table[i].scaling;
        p = plan_of(&s);
        for (int d = 0; d < 2; d++) {
            T_CHECK(p.shard_data_bytes[d] == table[i].shard[d], "row %lld direction %d: %lld", (long long)i, d,
                    (long long)p.shard_data_bytes[d]);
            T_CHECK(p.shard_scale_bytes[d] == table[i].scale[d], "row %lld direction %d: %lld", (long long)i, d,
                    (long long)p.shard_scale_bytes[d]);
            T_CHECK(p.gather_data_bytes[d] == table[i].gather[d], "row %lld direction %d: %lld", (long long)i, d,
                    (long long)p.gather_data_bytes[d]);
            T_CHECK(p.gather_scale_bytes[d] == table[i].gather_scale[d], "row %lld direction %d: %lld", (long long)i, d,
                    (long long)p.gather_scale_bytes[d]);
        }
    }
}

/* ----------------------------------------------------------------------------------------- Plans at random --- */

#define MAX_ROWS 1024

/* logical[i]: row of the whole weight at row i of the padded local matrix, -1 for padding. Written from the definition:
   for each section in turn, the TP rank's slice. */
static int64_t local_matrix(const gmm_shard *s, const int64_t *sections, int32_t count, int64_t *logical) {
    int64_t n = 0, start = 0;
    for (int32_t k = 0; k < count; k++) {
        const int64_t slice = s->tp_cut == GMM_TP_ROWS ? sections[k] / s->tp_size : sections[k];
        const int64_t skip = s->tp_cut == GMM_TP_ROWS ? slice * s->tp_rank : 0;
        for (int64_t i = 0; i < slice; i++) logical[n++] = start + skip + i;
        start += sections[k];
    }
    return n;
}

/* One random weight over all its ranks; `seen` counts how often each logical row is held. */
static void random_weight(void) {
    static const gmm_scaling scalings[] = {GMM_SCALING_NONE, GMM_SCALING_NONE, GMM_SCALING_NONE, GMM_SCALING_TENSOR,
                                           GMM_SCALING_MX32, GMM_SCALING_1X128, GMM_SCALING_128X128};
    int64_t sections[5], logical[MAX_ROWS], rows = 0;
    uint8_t seen[MAX_ROWS];
    const int32_t count = (int32_t)t_int(1, 5), tp = (int32_t)t_int(1, 4), g = (int32_t)t_int(1, 9);
    gmm_shard s = weight(0, 4 * tp, g, 0, 0);
    s.scaling = scalings[t_int(0, T_COUNT(scalings) - 1)];
    if (s.scaling != GMM_SCALING_NONE) s.dtype = GMM_E4M3;
    s.tp_cut = (gmm_tp_cut)t_int(0, 2);
    s.tp_size = tp;
    if (s.scaling == GMM_SCALING_NONE || s.scaling == GMM_SCALING_TENSOR) s.unit = t_int(0, 2) ? t_int(1, 40) : 0;
    else s.unit = gmm_gtp_unit(s.scaling) * t_int(0, 2);
    for (int32_t k = 0; k < count; k++) rows += sections[k] = tp * t_int(1, MAX_ROWS / 20 / 4);
    s.rows = rows;
    if (count > 1 || t_int(0, 1)) {
        s.section_rows = sections;
        s.sections = count;
    }
    memset(seen, 0, sizeof seen);
    for (int32_t t = 0; t < tp; t++) {
        int64_t local, unit, padded, held = 0;
        s.tp_rank = t;
        local = local_matrix(&s, sections, count, logical);
        unit = s.unit ? s.unit : gmm_gtp_unit(s.scaling);
        for (padded = local; g > 1 && padded % (unit * g) != 0;) padded++;
        for (int32_t r = 0; r < g; r++) {
            gmm_shard_plan p = GMM_ZERO;
            gmm_extent x[5];
            gmm_error e = GMM_ZERO;
            int32_t n = -1, m = -1;
            int64_t at = 0;
            s.gtp_rank = r;
            if (gmm_gtp_plan(&s, &p, &e) || gmm_gtp_extents(&s, NULL, 0, &n, &e) ||
                gmm_gtp_extents(&s, x, n ? n : 1, &m, &e))
                T_FAIL("%s", e.text);
            if (p.local_rows != local || p.padded_rows != padded || p.pad != padded - local ||
                p.shard_rows * g != padded || (g > 1 && p.shard_rows % unit != 0) || p.row0 != r * p.shard_rows ||
                m != n)
                T_FAIL("%lld rows (%d sections) tp %d cut %d g %d rank %d unit %lld: pad %lld", (long long)rows,
                       (int)count, (int)tp, (int)s.tp_cut, (int)g, (int)r, (long long)unit, (long long)p.pad);
            held += p.valid_rows;
            for (int32_t k = 0; k < n; k++) {
                int64_t start = 0;
                for (int32_t j = 0; j < x[k].section; j++) start += sections[j];
                T_CHECK(x[k].begin >= 0 && x[k].begin < x[k].end && x[k].end <= sections[x[k].section], "extent %d",
                        (int)k);
                T_CHECK(x[k].logical_row == start + x[k].begin && x[k].shard_row == at, "extent %d", (int)k);
                T_CHECK(k == 0 || x[k].section > x[k - 1].section, "extent %d", (int)k);
                for (int64_t i = x[k].begin; i < x[k].end; i++, at++) {
                    T_CHECK(logical[p.row0 + at] == start + i, "shard row %lld", (long long)at);
                    seen[start + i]++;
                }
            }
            T_CHECK(at == p.valid_rows, "%lld rows in extents, %lld valid", (long long)at, (long long)p.valid_rows);
        }
        T_CHECK(held == local, "%lld of %lld rows", (long long)held, (long long)local);
    }
    for (int64_t i = 0; i < rows; i++)
        T_CHECK(seen[i] == (s.tp_cut == GMM_TP_ROWS ? 1 : tp), "row %lld is held %d times", (long long)i, (int)seen[i]);
}

/* Sizes too large to mark every element: checks the arithmetic identities alone, in 64 bits. */
static void random_large(void) {
    const int32_t g = (int32_t)t_int(2, 4096), tp = (int32_t)t_int(1, 64);
    const int64_t unit = t_int(1, 512), local = t_int(1, (int64_t)1 << t_int(1, 40));
    int64_t held = 0;
    gmm_shard s = weight(local * tp, 1, g, 0, unit);
    s.tp_cut = GMM_TP_ROWS;
    s.tp_size = tp;
    s.tp_rank = tp - 1;
    for (int32_t k = 0; k < 3; k++) { /* first, last and the rank where the padding starts */
        gmm_shard_plan p = GMM_ZERO;
        s.gtp_rank = k == 0 ? 0 : k == 1 ? g - 1 : (int32_t)held;
        if (gmm_gtp_plan(&s, &p, NULL)) T_FAIL("refused");
        if (p.shard_rows % unit != 0 || p.shard_rows * g != p.padded_rows) T_FAIL("%lld rows", (long long)local);
        T_CHECK(p.pad == p.padded_rows - local && p.pad >= 0 && p.pad < unit * g, "pad %lld", (long long)p.pad);
        if (k == 0) held = local / p.shard_rows < g ? local / p.shard_rows : g - 1;
        if (k == 2) T_CHECK(p.row0 + p.valid_rows == local, "rank %d ends at %lld of %lld", (int)s.gtp_rank,
                            (long long)(p.row0 + p.valid_rows), (long long)local);
    }
}

static void random_plans(int arg) {
    for (int i = 0; i < 10000; i++)
        if (arg) random_large();
        else random_weight();
}

/* ---------------------------------------------------------------------------------------------------- Extents --- */

/* Five sections whose borders are not those of shards. */
static void sections5(int arg) {
    static const int64_t rows[5] = {300, 17, 400, 3, 40}; /* 760 */
    gmm_shard s = weight(760, 2, 4, 0, 51);
    (void)arg;
    s.section_rows = rows;
    s.sections = 5;
    {
        static const int32_t counts[4] = {1, 3, 1, 3};
        gmm_extent x[5];
        for (int32_t r = 0; r < 4; r++) {
            int32_t n = 0;
            s.gtp_rank = r;
            T_CHECK(plan_of(&s).pad == 56 && plan_of(&s).shard_rows == 204, "pad %lld", (long long)plan_of(&s).pad);
            T_OK_TEXT(gmm_gtp_extents(&s, x, 5, &n, NULL), "");
            T_CHECK(n == counts[r], "rank %d: %d extents", (int)r, (int)n);
        }
        /* rank 3 holds local rows [612, 760): 105 rows of section 2, section 3 and section 4 whole */
        T_CHECK(x[0].section == 2 && x[0].begin == 295 && x[0].end == 400 && x[0].logical_row == 612, "first");
        T_CHECK(x[1].section == 3 && x[1].begin == 0 && x[1].end == 3 && x[1].shard_row == 105, "second");
        T_CHECK(x[2].section == 4 && x[2].end == 40 && x[2].logical_row == 720 && x[2].shard_row == 108, "third");
    }
}

/* Rows saved at one TP and GTP size and loaded at another are the same rows. */
static void other_sizes(int arg) {
    static const int32_t sizes[] = {1, 2, 4, 8}, tps[] = {1, 2};
    static const int64_t gated[2] = {60, 60}, five[5] = {30, 18, 40, 2, 30};
    (void)arg;
    for (int kind = 0; kind < 3; kind++)
        for (int a = 0; a < 8; a++) {
            int64_t file[120];
            memset(file, 0xFF, sizeof file);
            for (int pass = 0; pass < 2; pass++)
                for (int b = 0; b < (pass ? 8 : 1); b++) { /* pass 0 saves at a, pass 1 loads at every b */
                    const int32_t g = sizes[(pass ? b : a) % 4], tp = tps[(pass ? b : a) / 4];
                    gmm_shard s = weight(120, 4, g, 0, 16);
                    const int64_t *rows = kind == 1 ? gated : kind == 2 ? five : &s.rows;
                    const int32_t count = kind == 1 ? 2 : kind == 2 ? 5 : 1;
                    s.tp_cut = GMM_TP_ROWS;
                    s.tp_size = tp;
                    s.section_rows = rows;
                    s.sections = count;
                    for (s.tp_rank = 0; s.tp_rank < tp; s.tp_rank++)
                        for (s.gtp_rank = 0; s.gtp_rank < g; s.gtp_rank++) {
                            int64_t logical[120];
                            gmm_shard_plan p = plan_of(&s);
                            gmm_extent x[5];
                            int32_t n = 0;
                            local_matrix(&s, rows, count, logical);
                            T_OK_TEXT(gmm_gtp_extents(&s, x, 5, &n, NULL), "");
                            for (int32_t k = 0; k < n; k++)
                                for (int64_t i = 0; i < x[k].end - x[k].begin; i++) {
                                    const int64_t content = logical[p.row0 + x[k].shard_row + i];
                                    if (!pass) file[x[k].logical_row + i] = 1000 + content;
                                    else T_CHECK(file[x[k].logical_row + i] == 1000 + content, "row %lld",
                                                 (long long)content);
                                }
                        }
                }
        }
}

/* A norm over the first valid_rows rows of every shard counts each element once, whatever the padding holds. */
static void norms(int arg) {
    int64_t sum = 0;
    (void)arg;
    for (int32_t t = 0; t < 2; t++)
        for (int32_t r = 0; r < 8; r++) {
            gmm_shard s = weight(2 * 1160, 6, 8, r, 32);
            gmm_shard_plan p;
            float *shard;
            s.tp_cut = GMM_TP_ROWS;
            s.tp_size = 2;
            s.tp_rank = t;
            p = plan_of(&s);
            shard = (float *)t_host((size_t)(p.shard_rows * p.local_cols) * sizeof *shard);
            for (int64_t i = 0; i < p.shard_rows * p.local_cols; i++) shard[i] = 12345.0f;
            for (int64_t i = 0; i < p.shard_rows; i++)
                if (p.row0 + i < 1160)
                    for (int64_t j = 0; j < p.local_cols; j++) shard[i * p.local_cols + j] = 1.0f;
            for (int64_t i = 0; i < p.valid_rows * p.local_cols; i++) sum += (int64_t)(shard[i] * shard[i]);
        }
    T_CHECK(sum == 2 * 1160 * 6, "squares add up to %lld", (long long)sum);
}

/* ----------------------------------------------------------------------------------------------------- Errors --- */

static const int64_t bad_sum[2] = {100, 101}, bad_long[2] = {300, 1}, bad_zero[2] = {192, 0}, odd_two[2] = {95, 97};

/* Breaks rule number `change` of a valid shard (192 x 256 bf16, TP 2 by rows, GTP 2). */
static const char *spoil(int change, gmm_shard *s, gmm_status *want) {
    *want = GMM_E_ARG;
    switch (change) {
    case 0: s->struct_size = (uint32_t)sizeof *s + 8; *want = GMM_E_VERSION; return "struct_size";
    case 1: s->struct_size = 7; return "struct_size 7 is too small";
    case 2: s->rows = 0; return "0 x 256";
    case 3: s->rows = -5; return "-5 x 256";
    case 4: s->cols = 0; return "192 x 0";
    case 5: s->tp_rank = 2; return "tp_rank 2";
    case 6: s->tp_rank = -1; return "tp_rank -1";
    case 7: s->tp_size = -2; return "tp_size -2";
    case 8: s->gtp_rank = 2; return "gtp_rank 2";
    case 9: s->gtp_size = -1; return "gtp_size -1";
    case 10: s->tp_cut = (gmm_tp_cut)7; return "tp_cut is 7";
    case 11: s->scaling = GMM_SCALING_ROW; s->dtype = GMM_E4M3; *want = GMM_E_DTYPE; return "row";
    case 12: s->scaling = GMM_SCALING_MX32; *want = GMM_E_DTYPE; return "bf16";
    case 13: s->dtype = GMM_NONE; *want = GMM_E_DTYPE; return "none";
    case 14: s->unit = -2; return "unit is -2";
    case 15: s->dtype = GMM_E4M3; s->scaling = GMM_SCALING_128X128; s->unit = 64; *want = GMM_E_CONFIG;
        return "unit is 64";
    case 16: s->dtype = GMM_E4M3; s->scaling = GMM_SCALING_1X128; s->unit = GMM_GTP_UNPADDED; *want = GMM_E_CONFIG;
        return "48 rows";
    case 17: s->unit = GMM_GTP_UNPADDED; s->rows = 190; *want = GMM_E_CONFIG; return "95 local rows";
    case 18: s->rows = 191; return "191 rows";
    case 19: s->tp_cut = GMM_TP_COLS; s->cols = 255; return "cols is 255";
    case 20: s->sections = 2; return "sections is 2";
    case 21: s->section_rows = bad_sum; return "section_rows is given";
    case 22: s->sections = -1; return "sections is -1";
    case 23: s->sections = 2; s->section_rows = bad_sum; return "section_rows[1] is 101";
    case 24: s->sections = 2; s->section_rows = bad_long; return "section_rows[0] is 300";
    case 25: s->sections = 2; s->section_rows = bad_zero; return "section_rows[1] is 0";
    case 26: s->sections = 2; s->section_rows = odd_two; return "section 0 has 95 rows";
    case 27: s->tp_multiple = 64; *want = GMM_E_CONFIG; return "tp_multiple 64";
    case 28: s->tp_multiple = -1; return "tp_multiple is -1";
    case 29: s->dtype = GMM_E2M1; s->scaling = GMM_SCALING_NV16; s->rows = 190; return "95 local rows";
    case 30: s->dtype = GMM_E2M1; s->scaling = GMM_SCALING_NV16; s->cols = 255; return "255";
    case 31: s->rows = INT64_MAX - 1; *want = GMM_E_OVERFLOW; return "64 bits";
    case 32: s->rows = (int64_t)1 << 40; s->cols = (int64_t)1 << 40; *want = GMM_E_OVERFLOW; return "64 bits";
    case 33: s->unit = INT64_MAX; *want = GMM_E_OVERFLOW; return "64 bits";
    case 34: s->rows = INT64_MAX - 1; s->unit = 1 << 20; s->tp_cut = GMM_TP_WHOLE; *want = GMM_E_OVERFLOW;
        return "64 bits";
    case 35: s->sections = 1; s->section_rows = bad_sum; return "section_rows[0] is 100 with 192";
    default: return NULL;
    }
}

static void errors(int arg) {
    gmm_error e = GMM_ZERO;
    gmm_status want;
    const char *needle;
    int change = 0;
    int32_t n = 77;
    (void)arg;
    for (;; change++) {
        gmm_shard s = weight(192, 256, 2, 1, 0);
        gmm_shard_plan p, before;
        gmm_extent x[2], x_before[2];
        gmm_gtp_use u = GMM_ZERO;
        gmm_gtp_memory m, m_before;
        s.tp_cut = GMM_TP_ROWS;
        s.tp_size = 2;
        (void)plan_of(&s);
        needle = spoil(change, &s, &want);
        if (!needle) break;
        memset(&p, 0xA5, sizeof p);
        memset(x, 0xA5, sizeof x);
        memset(&m, 0x25, sizeof m);
        m.struct_size = p.struct_size = 0;
        before = p;
        memcpy(x_before, x, sizeof x);
        m_before = m;
        T_REFUSED_TEXT(want, gmm_gtp_plan(&s, &p, &e), e.text, "gmm_gtp_plan", needle, NULL);
        T_CHECK(e.status == want && memcmp(&p, &before, sizeof p) == 0, "change %d", change);
        T_REFUSED_TEXT(want, gmm_gtp_extents(&s, x, 2, &n, &e), e.text, "gmm_gtp_extents", needle, NULL);
        T_CHECK(n == 77 && memcmp(x, x_before, sizeof x) == 0, "change %d", change);
        u.shard = &s;
        T_REFUSED_TEXT(want, gmm_gtp_memory_add(&u, &m, &e), e.text, "gmm_gtp_memory_add", needle, NULL);
        T_CHECK(memcmp(&m, &m_before, sizeof m) == 0, "change %d", change);
        T_CHECK(gmm_gtp_plan(&s, &p, NULL) == want, "without an error to fill");
    }
    T_CHECK(change == 36, "%d rules", change);
    {
        static const int64_t halves[2] = {96, 96};
        gmm_shard s = weight(192, 4, 1, 0, 0);
        gmm_shard_plan p = GMM_ZERO;
        gmm_extent x[2];
        s.section_rows = halves;
        s.sections = 2;
        T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_plan(NULL, &p, &e), e.text, "gmm_gtp_plan", "shard", NULL);
        T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_plan(&s, NULL, &e), e.text, "gmm_gtp_plan", "plan", NULL);
        p.struct_size = (uint32_t)sizeof p + 1;
        T_REFUSED_TEXT(GMM_E_VERSION, gmm_gtp_plan(&s, &p, &e), e.text, "plan->struct_size", NULL);
        T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_extents(&s, x, 2, NULL, &e), e.text, "count", NULL);
        T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_extents(&s, NULL, 2, &n, &e), e.text, "extents", "2", NULL);
        T_REFUSED_TEXT(GMM_E_ARG, gmm_gtp_extents(&s, x, -1, &n, &e), e.text, "capacity is -1", NULL);
        T_REFUSED_TEXT(GMM_E_WORKSPACE, gmm_gtp_extents(&s, x, 1, &n, &e), e.text, "capacity is 1", "2 extents", NULL);
        T_REFUSED_TEXT(GMM_E_WORKSPACE, gmm_gtp_extents(&s, x, 0, &n, &e), e.text, "capacity is 0", NULL);
        T_CHECK(n == 77, "count was written");
    }
}

/* Callers compiled against an older version: fields that their structs lack read as 0, and a plan is filled up to their
   struct_size. */
static void versions(int arg) {
    gmm_shard s = weight(100, 4, 2, 1, 50);
    gmm_shard_plan p;
    (void)arg;
    memset(&p, 0xA5, sizeof p);
    s.struct_size = (uint32_t)offsetof(gmm_shard, unit);
    p.struct_size = (uint32_t)offsetof(gmm_shard_plan, shard_data_bytes);
    T_OK_TEXT(gmm_gtp_plan(&s, &p, NULL), "");
    T_CHECK(p.unit == 16 && p.pad == 28 && p.struct_size == (uint32_t)offsetof(gmm_shard_plan, shard_data_bytes), "");
    t_bytes("the rest of the plan", p.shard_data_bytes, 0xA5, sizeof p - offsetof(gmm_shard_plan, shard_data_bytes));
    s.struct_size = (uint32_t)sizeof s;
    p.struct_size = (uint32_t)sizeof p;
    T_OK_TEXT(gmm_gtp_plan(&s, &p, NULL), "");
    T_CHECK(p.unit == 50 && p.pad == 0 && p.shard_data_bytes[0] == 50 * 4 * 2, "");
}

/* ----------------------------------------------------------------------------------------------------- Grids --- */

/* Calls `check` for every grid of at most 16 ranks. */
static void each_grid(void (*check)(const gmm_grid *grid, int32_t world)) {
    for (int kind = 0; kind < 2; kind++)
        for (int32_t a = 1; a <= 16; a++)
            for (int32_t b = 1; a * b <= 16; b++)
                for (int32_t c = 1; a * b * c <= 16; c++)
                    for (int32_t d = 1; a * b * c * d <= 16; d++)
                        for (int32_t p = 1; a * b * c * d * p <= 16; p++) {
                            gmm_grid grid = GMM_ZERO;
                            grid.kind = kind ? GMM_GRID_EXPERT : GMM_GRID_DENSE;
                            grid.size[GMM_AXIS_TP] = a;
                            grid.size[GMM_AXIS_GTP] = b;
                            grid.size[kind ? GMM_AXIS_EP : GMM_AXIS_CP] = c;
                            grid.size[GMM_AXIS_DP] = d;
                            grid.size[GMM_AXIS_PP] = p;
                            check(&grid, a * b * c * d * p);
                        }
}

static void check_bijection(const gmm_grid *grid, int32_t world) {
    const int32_t *n = grid->size;
    int32_t rank = 0, got = -1, c[GMM_AXIS_COUNT], back[GMM_AXIS_COUNT];
    T_CHECK(gmm_grid_world(grid, &got, NULL) == GMM_OK && got == world, "%d ranks", (int)got);
    for (int32_t p = 0; p < n[GMM_AXIS_PP]; p++)
        for (int32_t d = 0; d < n[GMM_AXIS_DP]; d++)
            for (int32_t hi = 0; hi < (grid->kind ? n[GMM_AXIS_GTP] : n[GMM_AXIS_CP]); hi++)
                for (int32_t lo = 0; lo < (grid->kind ? n[GMM_AXIS_EP] : n[GMM_AXIS_GTP]); lo++)
                    for (int32_t t = 0; t < n[GMM_AXIS_TP]; t++, rank++) {
                        memset(c, 0, sizeof c);
                        c[GMM_AXIS_TP] = t;
                        c[grid->kind ? GMM_AXIS_EP : GMM_AXIS_GTP] = lo;
                        c[grid->kind ? GMM_AXIS_GTP : GMM_AXIS_CP] = hi;
                        c[GMM_AXIS_DP] = d;
                        c[GMM_AXIS_PP] = p;
                        T_CHECK(gmm_grid_rank(grid, c, &got, NULL) == GMM_OK && got == rank, "rank %d, not %d",
                                (int)got, (int)rank);
                        T_CHECK(gmm_grid_coords(grid, rank, back, NULL) == GMM_OK, "rank %d", (int)rank);
                        t_same("coordinates", back, c, sizeof c);
                    }
    T_CHECK(rank == world, "%d ranks", (int)rank);
}

/* Of the ranks that hold the same part of a tensor exactly one writes it, and the groups along the axes that do
   not shard the tensor are exactly the ranks with the same part. */
static void check_writers(const gmm_grid *grid, int32_t world) {
    const uint32_t all = (1u << GMM_AXIS_COUNT) - 1;
    int32_t c[16][GMM_AXIS_COUNT] = {{0}};
    for (int32_t r = 0; r < world; r++) T_CHECK(gmm_grid_coords(grid, r, c[r], NULL) == GMM_OK, "rank %d", (int)r);
    for (uint32_t cut = 0; cut <= all; cut++) {
        gmm_grid_group group[16];
        int32_t writes[16];
        for (int32_t r = 0; r < world; r++) {
            T_CHECK(gmm_gtp_writes(grid, r, cut, &writes[r], NULL) == GMM_OK, "rank %d", (int)r);
            T_CHECK(gmm_grid_group_of(grid, r, all & ~cut, &group[r], NULL) == GMM_OK, "rank %d", (int)r);
        }
        for (int32_t r = 0; r < world; r++) {
            int32_t writers = 0, before = 0, size = 0, first = -1;
            for (int32_t q = 0; q < world; q++) {
                int same = 1;
                for (int a = 0; a < GMM_AXIS_COUNT; a++) same &= !(cut >> a & 1) || c[q][a] == c[r][a];
                if (!same) continue;
                writers += writes[q];
                before += q < r;
                size++;
                if (first < 0) first = q;
            }
            T_CHECK(writers == 1, "%d writers, cut 0x%x", (int)writers, (unsigned)cut);
            T_CHECK(group[r].first == first && group[r].size == size && group[r].index == before,
                    "rank %d cut 0x%x: group %d %d %d", (int)r, (unsigned)cut, (int)group[r].first, (int)group[r].index,
                    (int)group[r].size);
        }
    }
}

static void grids(int arg) { each_grid(arg ? check_writers : check_bijection); }

static void grid_errors(int arg) {
    gmm_grid g = GMM_ZERO, x = GMM_ZERO;
    gmm_grid_group group;
    gmm_error e = GMM_ZERO;
    int32_t c[GMM_AXIS_COUNT] = {0}, out = 77;
    (void)arg;
    g.size[GMM_AXIS_GTP] = 4;
    g.size[GMM_AXIS_DP] = 3;
    T_REFUSED_TEXT(GMM_E_NULL, gmm_grid_world(NULL, &out, &e), e.text, "gmm_grid_world", "grid", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_grid_world(&g, NULL, &e), e.text, "gmm_grid_world", "world", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_grid_coords(&g, 0, NULL, &e), e.text, "gmm_grid_coords", "coords", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_grid_rank(&g, NULL, &out, &e), e.text, "gmm_grid_rank", "coords", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_grid_rank(&g, c, NULL, &e), e.text, "gmm_grid_rank", "rank", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_grid_group_of(&g, 0, 0, NULL, &e), e.text, "gmm_grid_group_of", "group", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_writes(&g, 0, 0, NULL, &e), e.text, "gmm_gtp_writes", "writes", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_grid_match(&g, NULL, &e), e.text, "gmm_grid_match", "grid", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_grid_coords(&g, 12, c, &e), e.text, "rank is 12", "[0, 12)", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_gtp_writes(&g, -1, 0, &out, &e), e.text, "gmm_gtp_writes", "rank is -1", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_gtp_writes(&g, 0, 64, &out, &e), e.text, "gmm_gtp_writes: cut_axes is 0x40", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_grid_group_of(&g, 0, 1u << 6, &group, &e), e.text, "axes is 0x40", NULL);
    c[GMM_AXIS_GTP] = 4;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_grid_rank(&g, c, &out, &e), e.text, "coords[1] is 4", NULL);
    g.size[GMM_AXIS_EP] = 2;
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_grid_world(&g, &out, &e), e.text, "size of EP is 2", "dense", NULL);
    g.kind = GMM_GRID_EXPERT;
    T_OK_TEXT(gmm_grid_world(&g, &out, &e), e.text);
    T_CHECK(out == 24, "%d ranks", (int)out);
    out = 77;
    g.size[GMM_AXIS_CP] = 2;
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_grid_world(&g, &out, &e), e.text, "size of CP is 2", "expert", NULL);
    g.size[GMM_AXIS_CP] = -1;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_grid_world(&g, &out, &e), e.text, "size of CP is -1", NULL);
    g.size[GMM_AXIS_CP] = 1;
    g.size[GMM_AXIS_PP] = INT32_MAX;
    T_REFUSED_TEXT(GMM_E_OVERFLOW, gmm_grid_world(&g, &out, &e), e.text, "2^31", NULL);
    g.kind = (gmm_grid_kind)5;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_grid_world(&g, &out, &e), e.text, "kind is 5", NULL);
    g.kind = GMM_GRID_DENSE;
    g.struct_size = 1000;
    T_REFUSED_TEXT(GMM_E_VERSION, gmm_grid_world(&g, &out, &e), e.text, "struct_size 1000 is larger", NULL);
    T_CHECK(out == 77, "an output was written");

    memset(&g, 0, sizeof g); /* GTP and EGTP of different size in one job */
    g.size[GMM_AXIS_GTP] = 8;
    g.size[GMM_AXIS_PP] = 2;
    x.kind = GMM_GRID_EXPERT;
    x.size[GMM_AXIS_EP] = 4;
    x.size[GMM_AXIS_GTP] = 2;
    x.size[GMM_AXIS_PP] = 2;
    T_OK_TEXT(gmm_grid_match(&g, &x, &e), e.text);
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_grid_match(&x, &g, &e), e.text, "kinds are 1 and 0", NULL);
    x.size[GMM_AXIS_EP] = 8;
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_grid_match(&g, &x, &e), e.text, "16 ranks", "grid 32", NULL);
    x.size[GMM_AXIS_EP] = 2;
    x.size[GMM_AXIS_PP] = 4;
    T_REFUSED_TEXT(GMM_E_CONFIG, gmm_grid_match(&g, &x, &e), e.text, "PP is 2", "4 in the expert", NULL);
}

static void seeds(int arg) {
    (void)arg;
    T_CHECK(gmm_gtp_seed(1234, GMM_GRID_DENSE, 0) == 1234 + 65536, "dense rank 0");
    T_CHECK(gmm_gtp_seed(1234, GMM_GRID_DENSE, 7) == 1234 + 65536 * 8, "dense rank 7");
    T_CHECK(gmm_gtp_seed(1234, GMM_GRID_EXPERT, 0) == 1234 + 32768 + 65536, "expert rank 0");
    T_CHECK(gmm_gtp_seed(0, GMM_GRID_EXPERT, 0xFFFFFFFFu) == 32768 + ((uint64_t)1 << 48), "last rank");
}

/* ----------------------------------------------------------------------------------------------------- Memory --- */

/* 8 local experts of 4096 x 7168 and 7168 x 2048 in bf16, g = 8: 88 MB instead of 705 MB, and 1.4 GB of gather buffers
   that only many layers make worth it. */
static void worked_memory(int arg) {
    gmm_shard fc1 = weight(4096, 7168, 8, 3, 0), fc2 = weight(7168, 2048, 8, 3, 0);
    gmm_gtp_use use = GMM_ZERO;
    gmm_gtp_memory m = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    const int64_t elements = 8 * (4096LL * 7168 + 7168LL * 2048);
    (void)arg;
    use.bundle = 8;
    use.gather_slots = 2;
    use.main_grad = GMM_F32;
    use.shard = &fc1;
    T_OK_TEXT(gmm_gtp_memory_add(&use, &m, &e), e.text);
    use.shard = &fc2;
    T_OK_TEXT(gmm_gtp_memory_add(&use, &m, &e), e.text);
    T_CHECK(m.weights == 88080384 && m.whole_weights == 704643072, "%lld of %lld", (long long)m.weights,
            (long long)m.whole_weights);
    T_CHECK(m.gather == 2 * 704643072LL, "gather %lld", (long long)m.gather);
    T_CHECK(m.main_grads == 4 * elements / 8 && m.optimizer == 12 * elements / 8, "gradients and optimizer");
    T_CHECK(m.wgrad == 0 && m.reduce == 0, "no slots");
    T_CHECK(m.total == m.weights + m.main_grads + m.optimizer + m.gather, "total %lld", (long long)m.total);
}

static void memory(int arg) {
    gmm_shard s = weight(120, 64, 4, 0, 32); /* pad 8, 32 rows a rank */
    gmm_gtp_use use = GMM_ZERO;
    gmm_gtp_memory m = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    (void)arg;
    use.shard = &s;
    use.layers = 10;
    use.bundle = 3;
    use.gather_slots = 2;
    use.recompute_slots = 1;
    use.wgrad_slots = 2;
    use.reduce_slots = 1;
    use.main_grad = GMM_F32;
    use.wire = GMM_BF16;
    use.optimizer_ranks = 7;
    T_OK_TEXT(gmm_gtp_memory_add(&use, &m, &e), e.text);
    T_CHECK(m.weights == 30 * 32 * 64 * 2 && m.whole_weights == 30 * 120 * 64 * 2, "weights %lld",
            (long long)m.weights);
    T_CHECK(m.main_grads == 30 * 32 * 64 * 4 && m.optimizer == (30 * 32 * 64 + 6) / 7 * 12, "optimizer %lld",
            (long long)m.optimizer);
    T_CHECK(m.gather == 3 * 3 * 128 * 64 * 2, "gather %lld", (long long)m.gather);
    T_CHECK(m.wgrad == 2 * 3 * 128 * 64 * 2 && m.reduce == 3 * 32 * 64 * 2, "reduce %lld", (long long)m.reduce);

    /* all parts received before one sum; gradients on the wire in fp32, the default of a domain too, also for a bf16
       main_grad; SGD with momentum in bf16 */
    memset(&m, 0, sizeof m);
    use.all_to_all = 1;
    use.main_grad = GMM_BF16;
    use.wire = GMM_NONE;
    use.optimizer_bytes = 2;
    T_OK_TEXT(gmm_gtp_memory_add(&use, &m, &e), e.text);
    T_CHECK(m.reduce == 3 * 128 * 64 * 4 && m.wgrad == 2 * 3 * 128 * 64 * 4, "reduce %lld", (long long)m.reduce);
    T_CHECK(m.optimizer == (30 * 32 * 64 + 6) / 7 * 2, "optimizer %lld", (long long)m.optimizer);
    use.main_grad = GMM_F32;

    memset(&m, 0, sizeof m); /* rowwise and columnwise copies stored and gathered; recompute gathers one of them */
    s.dtype = GMM_E4M3;
    s.scaling = GMM_SCALING_MX32;
    T_OK_TEXT(gmm_gtp_memory_add(&use, &m, &e), e.text);
    T_CHECK(m.weights == 30 * (32 * 64 + 128 * 4 + 32 * 64 + 4 * 128), "weights %lld", (long long)m.weights);
    T_CHECK(m.gather == 3 * (3 * (128 * 64 + 128 * 4) + 2 * (128 * 64 + 4 * 128)), "gather %lld", (long long)m.gather);

    memset(&m, 0, sizeof m); /* one rank: nothing is gathered or received, but FP8 still needs its transpose */
    s.scaling = GMM_SCALING_TENSOR;
    s.gtp_size = 1;
    T_OK_TEXT(gmm_gtp_memory_add(&use, &m, &e), e.text);
    T_CHECK(m.weights == m.whole_weights && m.gather == 3 * 2 * (120 * 64 + 4), "gather %lld", (long long)m.gather);
    T_CHECK(m.wgrad == 2 * 3 * 120 * 64 * 4 && m.reduce == 0, "reduce %lld", (long long)m.reduce);
    memset(&m, 0, sizeof m);
    s.scaling = GMM_SCALING_NONE;
    s.dtype = GMM_BF16;
    T_OK_TEXT(gmm_gtp_memory_add(&use, &m, &e), e.text);
    T_CHECK(m.gather == 0 && m.total == m.weights + m.main_grads + m.optimizer + m.wgrad, "gather %lld",
            (long long)m.gather);

    memset(&m, 0, sizeof m); /* frozen */
    use.main_grad = GMM_NONE;
    use.wgrad_slots = use.reduce_slots = 0;
    T_OK_TEXT(gmm_gtp_memory_add(&use, &m, &e), e.text);
    T_CHECK(m.main_grads == 0 && m.optimizer == 0 && m.total == m.weights, "frozen");
}

static void memory_errors(int arg) {
    gmm_shard s = weight(128, 64, 4, 0, 0);
    gmm_gtp_use good = GMM_ZERO, use;
    gmm_gtp_memory m = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    (void)arg;
    good.shard = &s;
    good.main_grad = GMM_F32;
    T_OK_TEXT(gmm_gtp_memory_add(&good, &m, &e), e.text);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_memory_add(NULL, &m, &e), e.text, "use", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_memory_add(&good, NULL, &e), e.text, "memory", NULL);
#define BAD(status, field, value, ...) \
    use = good; use.field = value; \
    T_REFUSED_TEXT(status, gmm_gtp_memory_add(&use, &m, &e), e.text, "gmm_gtp_memory_add", __VA_ARGS__, NULL)
    BAD(GMM_E_NULL, shard, NULL, "shard");
    BAD(GMM_E_VERSION, struct_size, 999, "use->struct_size");
    BAD(GMM_E_ARG, bundle, -3, "bundle -3");
    BAD(GMM_E_ARG, layers, -3, "layers -3");
    BAD(GMM_E_ARG, optimizer_bytes, -3, "optimizer_bytes -3");
    BAD(GMM_E_ARG, optimizer_ranks, -3, "optimizer_ranks -3");
    BAD(GMM_E_ARG, gather_slots, -3, "gather -3");
    BAD(GMM_E_ARG, recompute_slots, -3, "recompute -3");
    BAD(GMM_E_ARG, wgrad_slots, -3, "wgrad -3");
    BAD(GMM_E_ARG, reduce_slots, -3, "reduce -3");
    BAD(GMM_E_ARG, reserved, 1, "reserved is 1");
    BAD(GMM_E_ARG, all_to_all, 2, "all_to_all is 2");
    BAD(GMM_E_DTYPE, main_grad, GMM_E4M3, "main_grad is e4m3");
    BAD(GMM_E_DTYPE, wire, GMM_F16, "wire is f16");
    BAD(GMM_E_OVERFLOW, layers, INT64_MAX / 2, "64 bits");
    good.wgrad_slots = 1;
    BAD(GMM_E_CONFIG, main_grad, GMM_NONE, "frozen", "wgrad_slots 1");
#undef BAD
    m.struct_size = (uint32_t)sizeof m + 4;
    T_REFUSED_TEXT(GMM_E_VERSION, gmm_gtp_memory_add(&good, &m, &e), e.text, "memory->struct_size", NULL);
}

/* Four stages of which two at a time are gathered together, by hand: a gather of two is 1 s of latency and 8 s, a GEMM
   3 s, a reduction 5 s; nothing is gathered ahead, and no gradient buffer is waited for. */
static void foresee_together(int arg) {
    gmm_gtp_stage x[4];
    gmm_gtp_forecast f = GMM_ZERO;
    gmm_shard s = weight(64, 16, 2, 0, 0);
    gmm_error e = GMM_ZERO;
    (void)arg;
    s.dtype = GMM_F32;
    f.stages = 4;
    f.gemm_rate = 2 * 64 * 16;
    f.link_rate = 64 * 16 * 4 / 2 / 4.0;
    f.latency = 1;
    f.wgrad_slots = 4;
    f.together = 2;
    memset(x, 0, sizeof x);
    for (int k = 0; k < 4; k++) x[k].shard = &s, x[k].tokens = 3;
    T_OK_TEXT(gmm_gtp_foresee(&f, x, &e), e.text);
    T_CHECK(x[0].gather == 5 && x[0].forward == 3 && x[0].reduce == 5, "alone %g", x[0].gather);
    /* forward: gathered 0-9, 9-12, 12-15; both slots are free at 15, gathered 15-24, 24-27, 27-30 */
    T_CHECK(x[0].exposed_forward == 9 && x[1].exposed_forward == 0 && x[2].exposed_forward == 9 &&
                x[3].exposed_forward == 0, "forward %g %g %g %g", x[0].exposed_forward, x[1].exposed_forward,
            x[2].exposed_forward, x[3].exposed_forward);
    /* backward: stage 3 30-33-36, stage 2 36-39-42, gathered 39-48, stage 1 48-51-54, stage 0 54-57-60, reduced to
       65 */
    T_CHECK(x[3].exposed_backward == 0 && x[2].exposed_backward == 0 && x[1].exposed_backward == 6 &&
                x[0].exposed_backward == 0, "backward %g %g %g %g", x[3].exposed_backward, x[2].exposed_backward,
            x[1].exposed_backward, x[0].exposed_backward);
    T_CHECK(f.step == 65 && f.compute == 36 && f.exposed_gather == 24 && f.exposed_reduce == 5 && f.gather == 27,
            "step %g, gather %g", f.step, f.gather);
    f.stages = 3; /* stage 2 is gathered alone, into the slot that is read at 12, to 17; in backward stage 0 alone */
    T_OK_TEXT(gmm_gtp_foresee(&f, x, &e), e.text);
    T_CHECK(x[2].exposed_forward == 2 && f.gather == 9 + 5 + 5, "a group cut short: %g, gather %g",
            x[2].exposed_forward, f.gather);
}

/* At this number of tokens a gather takes as long as the GEMM that hides it: only the chain's head is exposed; with
   fewer tokens every gather is. Then one step is computed by hand. */
static void foresee(int arg) {
    static const struct row { double tokens; int32_t g; double link; } rows[] = {
        {878, 2, 450e9}, {1317, 4, 450e9}, {1536, 8, 450e9}, {1162, 2, 340e9}, {1743, 4, 340e9}, {2033, 8, 340e9}};
    gmm_gtp_stage x[6];
    gmm_gtp_forecast f = GMM_ZERO;
    gmm_shard s = weight(8192, 8192, 2, 0, 0);
    gmm_error e = GMM_ZERO;
    (void)arg;
    f.stages = 6;
    f.gemm_rate = 790e12;
    f.prefetch = 1;
    for (int i = 0; i < (int)T_COUNT(rows); i++)
        for (int more = -1; more <= 1; more += 2) {
            memset(x, 0, sizeof x);
            s.gtp_size = rows[i].g;
            f.link_rate = rows[i].link;
            for (int k = 0; k < 6; k++) {
                x[k].shard = &s;
                x[k].tokens = rows[i].tokens + more;
            }
            T_OK_TEXT(gmm_gtp_foresee(&f, x, &e), e.text);
            T_CHECK(fabs(x[0].exposed_forward - x[0].gather) < 1e-9, "the head is exposed");
            T_CHECK((x[1].exposed_forward > 0) == (more < 0), "%g tokens: %g s exposed", x[1].tokens,
                    x[1].exposed_forward);
            T_CHECK(x[5].exposed_backward == 0 && x[4].exposed_backward == 0, "both slots are still there");
            T_CHECK(fabs(f.step - f.compute - f.exposed_gather - f.exposed_reduce) < 1e-12, "the step adds up");
        }
    f.stages = 3; /* by hand: gathers of 4 s, GEMMs of 3 s, reductions of 5 s, one slot ahead, one gradient buffer */
    f.gemm_rate = 2 * 64 * 16;
    f.link_rate = 64 * 16 * 4 / 2 / 4.0;
    f.wire = GMM_F32;
    f.latency = 0;
    f.wgrad_slots = 1;
    s = weight(64, 16, 2, 0, 0);
    s.dtype = GMM_F32;
    memset(x, 0, sizeof x);
    for (int k = 0; k < 3; k++) {
        x[k].shard = &s;
        x[k].tokens = 3;
    }
    T_OK_TEXT(gmm_gtp_foresee(&f, x, &e), e.text);
    T_CHECK(x[0].gather == 4 && x[0].forward == 3 && x[0].backward == 6 && x[0].reduce == 4 && x[0].sum == 0, "alone");
    /* forward: 4 wait, 4-7, 8-11 (gathered 4-8), 12-15 (its slot is read at 7, gathered 8-12) */
    T_CHECK(x[0].exposed_forward == 4 && x[1].exposed_forward == 1 && x[2].exposed_forward == 1, "forward %g %g %g",
            x[0].exposed_forward, x[1].exposed_forward, x[2].exposed_forward);
    /* backward: 15-18-21, reduced 21-25; 21-24, waits to 25 for the buffer, -28, reduced 28-32; stage 0 is gathered
       18-22 in the slot read at 18, 28-31, waits to 32, -35, reduced 35-39 */
    T_CHECK(x[2].exposed_backward == 0 && x[1].exposed_reduce == 1 && x[0].exposed_backward == 0 &&
                x[0].exposed_reduce == 1, "backward %g %g %g %g", x[2].exposed_backward, x[1].exposed_reduce,
            x[0].exposed_backward, x[0].exposed_reduce);
    T_CHECK(f.step == 39 && f.compute == 27 && f.exposed_gather == 6 && f.exposed_reduce == 6 && f.gather == 16 &&
                f.reduce == 12, "step %g", f.step);
    f.wrap = 1;
    T_OK_TEXT(gmm_gtp_foresee(&f, x, &e), e.text);
    T_CHECK(x[0].exposed_forward == 0 && x[1].exposed_forward == 0, "the head is there already");
    f.together = 9;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_gtp_foresee(&f, x, &e), e.text, "together 9", "0 to 8", NULL);
    f.together = 1;
    s.gtp_size = 1;
    T_OK_TEXT(gmm_gtp_foresee(&f, x, &e), e.text);
    T_CHECK(f.step == f.compute && f.gather == 0 && f.reduce == 0, "one rank has nothing to wait for");
    f.wire = f.main_grad = GMM_NONE;
    f.wgrad_slots = f.together = 0;
    T_OK_TEXT(gmm_gtp_foresee(&f, x, &e), e.text);
    T_CHECK(f.wire == GMM_NONE && f.main_grad == GMM_NONE && !f.wgrad_slots && !f.together, "defaults are written");
    f.struct_size = (uint32_t)offsetof(gmm_gtp_forecast, gathered_bytes); /* an older one, without the last fields */
    f.step = 0;
    f.gathered_bytes = f.reduced_bytes = 77;
    T_OK_TEXT(gmm_gtp_foresee(&f, x, &e), e.text);
    T_CHECK(f.step == f.compute && f.gathered_bytes == 77 && f.reduced_bytes == 77, "what an older caller has");
    f.struct_size = sizeof f + 4;
    T_REFUSED_TEXT(GMM_E_VERSION, gmm_gtp_foresee(&f, x, &e), e.text, "forecast->struct_size", NULL);
    f.struct_size = 0;
    x[1].struct_size = sizeof *x - 8;
    T_REFUSED_TEXT(GMM_E_VERSION, gmm_gtp_foresee(&f, x, &e), e.text, "stages[1].struct_size", NULL);
    x[1].struct_size = 0;
    x[1].tokens = -1;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_gtp_foresee(&f, x, &e), e.text, "stages[1]: bundle is", "tokens -1", NULL);
    f.link_rate = 0;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_gtp_foresee(&f, x, &e), e.text, "gmm_gtp_foresee", "link_rate 0", NULL);
    f.link_rate = 1;
    f.wire = GMM_F16;
    T_REFUSED_TEXT(GMM_E_DTYPE, gmm_gtp_foresee(&f, x, &e), e.text, "wire is f16", NULL);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_foresee(&f, NULL, &e), e.text, "stages", NULL);
}

/* Gradients of ones, each counted by the rank that writes it and over its valid rows, sum up over the whole world
   (GTP and EGTP included) to the number of logical parameters; no smaller group gives that sum. */
static void norm_group(int arg) {
    int32_t world = 0;
    int64_t all = 0, logical = 0, without_gtp = 0;
    (void)arg;
    for (int kind = 0; kind < 2; kind++) {
        gmm_grid grid = GMM_ZERO;
        const int64_t rows = kind ? 52 : 76, cols = 4;
        grid.kind = kind ? GMM_GRID_EXPERT : GMM_GRID_DENSE;
        grid.size[GMM_AXIS_TP] = 2;
        grid.size[GMM_AXIS_GTP] = kind ? 2 : 4;
        grid.size[kind ? GMM_AXIS_EP : GMM_AXIS_CP] = 2;
        grid.size[GMM_AXIS_DP] = kind ? 2 : 1;
        T_OK_TEXT(gmm_grid_world(&grid, &world, NULL), "");
        T_CHECK(world == 16, "%d ranks", (int)world);
        logical += rows * cols * (kind ? 2 : 1) + cols; /* a weight (for each EP rank), and a replicated vector */
        for (int32_t r = 0; r < world; r++) {
            int32_t c[GMM_AXIS_COUNT], mine = 0, vector = 0;
            gmm_shard s = weight(rows, cols, grid.size[GMM_AXIS_GTP], 0, 8);
            const uint32_t cut = 1u << GMM_AXIS_PP | 1u << GMM_AXIS_GTP | 1u << GMM_AXIS_TP |
                                 (kind ? 1u << GMM_AXIS_EP : 0);
            T_OK_TEXT(gmm_grid_coords(&grid, r, c, NULL), "");
            s.tp_cut = GMM_TP_ROWS;
            s.tp_size = 2;
            s.tp_rank = c[GMM_AXIS_TP];
            s.gtp_rank = c[GMM_AXIS_GTP];
            T_OK_TEXT(gmm_gtp_writes(&grid, r, cut, &mine, NULL), "");
            T_OK_TEXT(gmm_gtp_writes(&grid, r, 1u << GMM_AXIS_PP, &vector, NULL), "");
            all += mine * plan_of(&s).valid_rows * cols + vector * cols;
            if (c[GMM_AXIS_GTP] == 0) without_gtp += mine * plan_of(&s).valid_rows * cols + vector * cols;
        }
    }
    T_CHECK(all == logical, "%lld squares of %lld parameters", (long long)all, (long long)logical);
    T_CHECK(without_gtp < logical, "a group without GTP would do");
}

/* GTP peers see different tokens. Counts added up over GTP, CP and DP are the same on every rank that shares the
   router, whatever its TP, so that its bias moves alike everywhere; without GTP they are not. */
static void router_counts(int arg) {
    const uint32_t data = 1u << GMM_AXIS_GTP | 1u << GMM_AXIS_CP | 1u << GMM_AXIS_DP;
    gmm_grid grid = GMM_ZERO;
    int64_t seen[2][24];
    int diverged = 0;
    (void)arg;
    grid.size[GMM_AXIS_TP] = 2;
    grid.size[GMM_AXIS_GTP] = 3;
    grid.size[GMM_AXIS_CP] = 2;
    grid.size[GMM_AXIS_DP] = 2;
    for (int with = 0; with < 2; with++)
        for (int32_t r = 0; r < 24; r++) {
            const uint32_t axes = with ? data : data & ~(1u << GMM_AXIS_GTP);
            gmm_grid_group mine, other;
            int64_t tokens = 0;
            T_OK_TEXT(gmm_grid_group_of(&grid, r, axes, &mine, NULL), "");
            /* tokens of rank q for the expert; they differ between data-parallel ranks */
            for (int32_t q = 0; q < 24; q++) {
                int32_t c[GMM_AXIS_COUNT];
                T_OK_TEXT(gmm_grid_group_of(&grid, q, axes, &other, NULL), "");
                T_OK_TEXT(gmm_grid_coords(&grid, q, c, NULL), "");
                if (other.first == mine.first)
                    tokens += (int64_t)1 << (c[GMM_AXIS_GTP] + 3 * c[GMM_AXIS_CP] + 6 * c[GMM_AXIS_DP]);
            }
            seen[with][r] = tokens;
        }
    for (int32_t r = 0; r < 24; r++) {
        T_CHECK(seen[1][r] == (1 << 12) - 1, "rank %d counts 0x%llx", (int)r, (unsigned long long)seen[1][r]);
        diverged += seen[0][r] != seen[0][0];
    }
    T_CHECK(diverged > 0, "the group without GTP agrees: the case shows nothing");
}

/* What gmm_ranks_comms and gmm_ranks_runtime refuse: the message is rank 0's. */
static void ranks_refused(int arg) {
    const int32_t past[] = { 0, 3 }, twice[] = { 2, 1, 2 }, all[] = { 0, 1, 2 };
    gmm_ranks_config config = { .ranks = 3 };
    gmm_ranks *ranks;
    gmm_comm comm[3];
    gmm_runtime rt;
    gmm_error error;
    (void)arg;
    T_OK_TEXT(gmm_ranks_create(&config, &ranks, &error), error.text);
#define REFUSED(want, call, ...) T_REFUSED_TEXT(want, call, gmm_ranks_error(ranks, 0), __VA_ARGS__, NULL)
    REFUSED(GMM_E_NULL, gmm_ranks_comms(ranks, NULL, 3, comm), "gmm_ranks_comms: members is NULL");
    REFUSED(GMM_E_NULL, gmm_ranks_comms(ranks, all, 3, NULL), "gmm_ranks_comms: out is NULL");
    REFUSED(GMM_E_ARG, gmm_ranks_comms(ranks, all, 0, comm), "count 0", "1 to 3");
    REFUSED(GMM_E_ARG, gmm_ranks_comms(ranks, all, 4, comm), "count 4", "1 to 3");
    REFUSED(GMM_E_ARG, gmm_ranks_comms(ranks, past, 2, comm), "members[1] is 3", "0 to 2");
    REFUSED(GMM_E_ARG, gmm_ranks_comms(ranks, twice, 3, comm), "members[0] and members[2] are 2", "distinct");
    REFUSED(GMM_E_NULL, gmm_ranks_runtime(ranks, 1, NULL), "gmm_ranks_runtime: out is NULL");
    REFUSED(GMM_E_ARG, gmm_ranks_runtime(ranks, 3, &rt), "gmm_ranks_runtime: rank 3", "0 to 2");
    REFUSED(GMM_E_ARG, gmm_ranks_runtime(ranks, -1, &rt), "gmm_ranks_runtime: rank -1", "0 to 2");
#undef REFUSED
    T_OK_TEXT(gmm_ranks_comms(ranks, all, 3, comm), gmm_ranks_error(ranks, 0));
    gmm_ranks_destroy(ranks);
}

/* A graph in which a rank calls a collective on a stream that joins the capture, then one on its origin: a launch keeps
   the order of the calls, not of the streams. */
static void graph_order(int arg) {
    const int32_t member = 0;
    gmm_ranks_config config = GMM_ZERO;
    gmm_ranks *ranks;
    gmm_ranks_graph *graph;
    gmm_runtime rt;
    gmm_comm comm;
    gmm_stream origin, side;
    gmm_event forked, joined;
    gmm_error error;
    float amax[2] = { 3.0f, 4.0f };
    (void)arg;
    config.ranks = 1;
    config.timeout_ms = 300;
    T_OK_TEXT(gmm_ranks_create(&config, &ranks, &error), error.text);
#define OK(call) T_OK_TEXT(call, gmm_ranks_error(ranks, 0))
    OK(gmm_ranks_comms(ranks, &member, 1, &comm));
    OK(gmm_ranks_runtime(ranks, 0, &rt));
    OK(rt.stream_create(rt.self, 0, &origin));
    OK(rt.stream_create(rt.self, 0, &side));
    OK(rt.event_create(rt.self, &forked));
    OK(rt.event_create(rt.self, &joined));
    T_CHECK(gmm_ranks_capture_begin(ranks, 5, origin) == GMM_E_ARG && gmm_ranks_capture_begin(NULL, 0, origin) ==
            GMM_E_NULL, "a rank that does not exist");
    OK(gmm_ranks_capture_begin(ranks, 0, origin));
    OK(rt.event_record(rt.self, forked, origin, 0));
    OK(rt.stream_wait(rt.self, side, forked, 0));
    OK(comm.all_reduce_max(comm.self, amax, 1, side));
    OK(rt.event_record(rt.self, joined, side, 0));
    OK(rt.stream_wait(rt.self, origin, joined, 0));
    OK(comm.all_reduce_max(comm.self, amax + 1, 1, origin));
    OK(gmm_ranks_capture_end(ranks, 0, origin, &graph));
    for (int i = 0; i < 2; i++) {
        OK(gmm_ranks_launch(graph, origin));
        OK(gmm_ranks_run(ranks));
    }
    OK(rt.event_destroy(rt.self, forked));
    OK(rt.event_destroy(rt.self, joined));
#undef OK
    gmm_ranks_graph_destroy(graph);
    gmm_ranks_destroy(ranks);
}

void tests_gtp(void) {
    t_add_host(graph_order, 0, "gtp ranks, a graph keeps the order of collectives");
    t_add_host(even_plan, 1, "gtp plan aligned");
    t_add_host(even_plan, 2, "gtp plan padded");
    t_add_host(all_padding, 0, "gtp plan all-padding ranks");
    t_add_host(per_slice, 0, "gtp plan per TP slice");
    t_add_host(unpadded, 0, "gtp plan unpadded");
    for (int i = 0; i < 10; i++) t_add_host(random_plans, 0, "gtp plan and extents at random %d", i);
    t_add_host(random_plans, 1, "gtp plan at random, large");
    t_add_host(units, 0, "gtp plan units");
    t_add_host(bytes, 0, "gtp plan bytes by format");
    t_add_host(sections5, 0, "gtp extents of five sections");
    t_add_host(other_sizes, 0, "gtp extents of other sizes meet");
    t_add_host(norms, 0, "gtp norm skips padding");
    t_add_host(errors, 0, "gtp plan errors");
    t_add_host(versions, 0, "gtp plan struct sizes");
    t_add_host(grids, 0, "gtp grid ranks and coordinates");
    t_add_host(grids, 1, "gtp grid, one writer");
    t_add_host(grid_errors, 0, "gtp grid errors");
    t_add_host(norm_group, 0, "gtp who counts in a norm");
    t_add_host(router_counts, 0, "gtp groups that count tokens");
    t_add_host(seeds, 0, "gtp seeds of ranks");
    t_add_host(worked_memory, 0, "gtp memory, worked example");
    t_add_host(memory, 0, "gtp memory");
    t_add_host(memory_errors, 0, "gtp memory errors");
    t_add_host(ranks_refused, 0, "gtp ranks refused");
    t_add_host(foresee, 0, "gtp forecast");
    t_add_host(foresee_together, 0, "gtp forecast of gathers together");
}
