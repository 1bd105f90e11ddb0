/* cases.c - see cases.h: ids, memory, operands. */
#include "cases_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

gmm_context *case_context;
gmm_stream case_stream;
static case_setup setup;
static case_memory memory;
static char error_text[1024];

/* -------------------------------------------------------------------------------------------------------- Words --- */

typedef struct word { const char *text; int value; } word;

/* Values of gmm_dtype. */
static const word DTYPES[] = { { "f32", 1 }, { "f16", 2 }, { "bf16", 3 }, { NULL, 0 } };
static const word ENGINES[] = { { "auto", 0 }, { "cpu", 1 }, { "mma", 2 }, { "wgmma", 3 }, { "cublaslt", 4 },
                                { NULL, 0 } };
enum { SPLIT_EVEN, SPLIT_SKEW, SPLIT_ODD, SPLIT_ONE, SPLIT_NONE };
static const word SPLITS[] = { { "even", SPLIT_EVEN }, { "skew", SPLIT_SKEW }, { "odd", SPLIT_ODD },
                               { "one", SPLIT_ONE }, { "none", SPLIT_NONE }, { NULL, 0 } };
/* Values of gmm_act_kind. */
static const word ACTS[] = { { "relu", 1 }, { "relu2", 2 }, { "gelu", 3 }, { "qgelu", 4 }, { "silu", 5 }, { "glu", 6 },
                             { "reglu", 7 }, { "relu2glu", 8 }, { "geglu", 9 }, { "qgeglu", 10 }, { "swiglu", 11 },
                             { "situglu", 12 }, { "gelu_erf", 13 }, { "geglu_erf", 14 }, { NULL, 0 } };
static const word FLAGS[] = {
#define CASE_WORD(name, text) { text, CASE_BIT_##name },
    CASE_FLAGS(CASE_WORD)
    { NULL, 0 }
};
static const word POLICIES[] = {
    CASE_POLICIES(CASE_WORD)
#undef CASE_WORD
    { NULL, 0 }
};

/* A recipe (values of gmm_recipe_kind) with changes. */
enum {
    FORMAT_ROW = 1, FORMAT_FP32_SCALES = 2, FORMAT_W_1X128 = 4, FORMAT_W_E2M1 = 8, FORMAT_W_ONLY = 16,
    FORMAT_SWIZZLED = 32, FORMAT_PLAIN = 64, FORMAT_ROW_AMAX = 128, FORMAT_4_OVER_6 = 256
};
typedef struct format_word { const char *text; int kind, changes; } format_word;
static const format_word FORMATS[] = {
    { "fp8-delayed", 1, 0 }, { "fp8-tensor", 2, 0 }, { "fp8-row", 2, FORMAT_ROW }, { "fp8-1x128", 3, 0 },
    { "fp8-1x128-fp32scales", 3, FORMAT_FP32_SCALES }, { "fp8-1x128-1x128", 3, FORMAT_W_1X128 },
    { "mx8", 4, 0 }, { "mx8-mx4", 4, FORMAT_W_E2M1 }, { "mx8-swizzled", 4, FORMAT_SWIZZLED },
    { "wonly-mx8", 4, FORMAT_W_ONLY }, { "wonly-mx4", 4, FORMAT_W_E2M1 | FORMAT_W_ONLY },
    { "nv4", 5, 0 }, { "nv4-plain", 5, FORMAT_PLAIN }, { "nv4-rowamax", 5, FORMAT_PLAIN | FORMAT_ROW_AMAX },
    { "nv4-46", 5, FORMAT_PLAIN | FORMAT_4_OVER_6 }, { "wonly-nv4", 5, FORMAT_W_ONLY }, { NULL, 0, 0 }
};

static gmm_recipe recipe_of(const format_word *f) {
    gmm_recipe r = gmm_recipe_of((gmm_recipe_kind)f->kind);
    if (f->changes & FORMAT_ROW) r.input.scaling = r.weight.scaling = r.grad.scaling = GMM_SCALING_ROW;
    if (f->changes & FORMAT_FP32_SCALES) r.input.pow2 = r.weight.pow2 = r.grad.pow2 = 0;
    if (f->changes & FORMAT_W_1X128) r.weight.scaling = GMM_SCALING_1X128;
    if (f->changes & FORMAT_W_E2M1) r.weight.dtype = GMM_E2M1;
    if (f->changes & FORMAT_SWIZZLED) r.input.order = r.weight.order = r.grad.order = GMM_SCALES_SWIZZLED;
    if (f->changes & FORMAT_PLAIN) r.input.hadamard = r.grad.hadamard = r.grad.stochastic = 0;
    if (f->changes & FORMAT_ROW_AMAX) r.input.row_amax = 1;
    if (f->changes & FORMAT_4_OVER_6) r.weight.four_over_six = r.weight.e4m3_256 = 1;
    if (f->changes & FORMAT_W_ONLY) {
        memset(&r.input, 0, sizeof r.input);
        memset(&r.grad, 0, sizeof r.grad);
    }
    return r;
}

static int look(const word *table, const char *text, int *value) {
    for (; table->text; table++)
        if (!strcmp(table->text, text)) {
            *value = table->value;
            return 1;
        }
    return 0;
}

/* A number after the name of a size: g5, past3. */
static int number(case_run *r, const char *token) {
    const struct { const char *name; int64_t *to; } sizes[] = {
        { "g", &r->groups }, { "t", &r->rows }, { "k", &r->K }, { "n", &r->N }, { "past", &r->past },
        { "top", &r->top }, { "align", &r->align }, { "block", &r->block },
        { "count", &r->count }, { "tile", &r->tile }
    };
    const size_t letters = strcspn(token, "0123456789");
    char *end;
    long long value;
    if (!token[letters]) return 0;
    value = strtoll(token + letters, &end, 10);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] && !*end; i++)
        if (strlen(sizes[i].name) == letters && !strncmp(sizes[i].name, token, letters)) {
            *sizes[i].to = value;
            return 1;
        }
    return 0;
}

static int token_of(case_run *r, const char *token) {
    int value;
    if (look(DTYPES, token, &value)) r->source = (gmm_dtype)value;
    else if (look(ENGINES, token, &value)) r->engine = (gmm_engine)value;
    else if (look(SPLITS, token, &value)) r->split = value;
    else if (look(ACTS, token, &value)) r->act = value;
    else if (look(FLAGS, token, &value)) r->flags |= 1u << value;
    else if (look(POLICIES, token, &value)) r->policies |= 1u << value;
    else {
        for (const format_word *f = FORMATS; f->text; f++)
            if (!strcmp(f->text, token)) {
                r->recipe = recipe_of(f);
                r->quantized = 1;
                return 1;
            }
        return number(r, token);
    }
    return 1;
}

static int parse(case_run *r, const char *id) {
    char text[sizeof r->id], *family, *name, *token;
    if (strlen(id) >= sizeof r->id) return case_fail(r, GMM_E_ARG, "the id is too long");
    strcpy(r->id, id);
    strcpy(text, id);
    r->groups = r->K = r->N = 1;
    r->source = GMM_BF16;
    family = strtok(text, ".");
    name = strtok(NULL, ".");
    if (!family || !name) return case_fail(r, GMM_E_ARG, "an id is family.operation and more");
    for (r->op = 0; CASE_OPERATIONS[r->op].family; r->op++)
        if (!strcmp(CASE_OPERATIONS[r->op].family, family) && !strcmp(CASE_OPERATIONS[r->op].name, name)) break;
    if (!CASE_OPERATIONS[r->op].family) return case_fail(r, GMM_E_ARG, "no such operation");
    while ((token = strtok(NULL, ".")) != NULL) {
        int engine;
        if (!token_of(r, token)) return case_fail(r, GMM_E_ARG, token);
        if (look(ENGINES, token, &engine)) continue; /* the engine does not change the random data */
        for (const char *c = token; *c; c++) r->seed = case_hash(r->seed, (uint64_t)(unsigned char)*c);
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------- Errors --- */

int case_fail(case_run *r, gmm_status status, const char *text) {
    if (r->status == GMM_OK) {
        r->status = status;
        snprintf(error_text, sizeof error_text, "%s: %s: %s", r->id, gmm_status_name(status), text);
    }
    return 1;
}
int case_check(case_run *r, gmm_status status) {
    return status == GMM_OK ? 0 : case_fail(r, status, gmm_last_error(case_context));
}
const char *case_error(void) { return error_text; }

/* ------------------------------------------------------------------------------------------------------- Memory --- */

int64_t case_bytes(gmm_dtype dtype) { return gmm_dtype_bits(dtype) / 8; }

uint64_t case_hash(uint64_t seed, uint64_t i) {
    uint64_t x = seed * UINT64_C(0x9E3779B97F4A7C15) + i + UINT64_C(0x632BE59BD9B4E019);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

void *case_alloc(case_run *r, size_t bytes) {
    void *p = memory.alloc(bytes ? bytes : 1);
    if (!p) {
        (void)case_fail(r, GMM_E_MEMORY, "the arena is used up");
        r->memory_failed = 1;
        return NULL;
    }
    memory.set(p, 0xFF, bytes);
    return p;
}

void *case_put(case_run *r, const void *host, size_t bytes) {
    void *p = case_alloc(r, bytes);
    if (p) memory.put(p, host, bytes);
    return p;
}

void case_output_add(case_run *r, const char *name, const void *data, size_t bytes) {
    if (r->output_count == CASE_OUTPUTS) {
        (void)case_fail(r, GMM_E_ARG, "too many outputs");
        return;
    }
    r->outputs[r->output_count].name = name;
    r->outputs[r->output_count].data = data;
    r->outputs[r->output_count++].bytes = bytes;
}

void *case_out(case_run *r, const char *name, size_t bytes) {
    void *p = case_alloc(r, bytes);
    if (p) case_output_add(r, name, p, bytes);
    return p;
}

/* Random elements. Large operands repeat a pattern whose length is odd. */
static void *random_elements(case_run *r, gmm_dtype dtype, int64_t n, float low, float high) {
    const int64_t size = case_bytes(dtype), period = n < (1 << 20) + 1 ? n : (1 << 20) + 1;
    const uint64_t seed = ++r->seed;
    char *p = (char *)case_alloc(r, (size_t)(n * size)), *host;
    if (!p || n == 0) return p;
    host = (char *)malloc((size_t)(period * size));
    if (!host) return NULL;
    for (int64_t i = 0; i < period; i++) {
        const float v = low + (high - low) * (float)(case_hash(seed, (uint64_t)i) >> 40) / 16777216.0f;
        if (dtype == GMM_F32) memcpy(host + 4 * i, &v, 4);
        else {
            const uint16_t bits = dtype == GMM_F16 ? gmm_f32_to_f16(v) : gmm_f32_to_bf16(v);
            memcpy(host + 2 * i, &bits, 2);
        }
    }
    memory.put(p, host, (size_t)(period * size));
    for (int64_t have = period; have < n; have *= 2) {
        const int64_t more = n - have < have ? n - have : have;
        memory.copy(p + have * size, p, (size_t)(more * size));
    }
    free(host);
    return p;
}

float *case_floats(case_run *r, int64_t n, float low, float high) {
    return (float *)random_elements(r, GMM_F32, n, low, high);
}

gmm_mat *case_mat(case_run *r) {
    if (r->mat_count == CASE_MATS) {
        (void)case_fail(r, GMM_E_ARG, "too many matrices");
        return &r->mats[0];
    }
    return &r->mats[r->mat_count++];
}

gmm_mat *case_in(case_run *r, gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols) {
    gmm_mat *m = case_mat(r);
    m->dtype = dtype;
    m->data = random_elements(r, dtype, count * rows * cols, -1.0f, 1.0f);
    return m;
}

gmm_mat *case_mat_out(case_run *r, const char *name, gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols) {
    gmm_mat *m = case_mat(r);
    m->dtype = dtype;
    m->data = case_out(r, name, (size_t)(count * rows * cols * case_bytes(dtype)));
    return m;
}

gmm_mat *case_tabled(case_run *r, gmm_mat *m, int64_t count, int64_t rows, int64_t cols) {
    void **table;
    if (!(r->flags & CASE_TABLE) || !m->data) return m;
    table = (void **)malloc((size_t)count * sizeof *table);
    if (!table) return m;
    for (int64_t i = 0; i < count; i++) table[i] = (char *)m->data + i * rows * cols * case_bytes(m->dtype);
    m->table = (void *const *)case_put(r, table, (size_t)count * sizeof *table);
    m->data = NULL;
    free(table);
    return m;
}

void *case_workspace(case_run *r, size_t bytes) {
    if (bytes > r->workspace_bytes) {
        r->workspace = case_alloc(r, bytes);
        r->workspace_bytes = bytes;
    }
    return r->workspace;
}

/* ----------------------------------------------------------------------------------------------------- Operands --- */

gmm_mat *case_storage(case_run *r, const char *name, const gmm_format *f, gmm_direction direction, int64_t count,
                      int64_t rows, int64_t cols) {
    gmm_layout l = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    gmm_mat *m = case_mat(r);
    const int64_t times = count ? count : 1, amaxes = f->row_amax && !count ? r->g.capacity : count ? count : r->groups;
    const gmm_status s = count ? gmm_layout_of(f->dtype, f->scaling, f->order, direction, rows, cols, &l, &e)
                               : gmm_layout_of_groups(f->dtype, f->scaling, f->order, direction, (int32_t)r->groups,
                                                      r->g.capacity, cols, &l, &e);
    void *data, *scale, *amax;
    if (s != GMM_OK) {
        (void)case_fail(r, s, e.text);
        return m;
    }
    data = case_alloc(r, (size_t)(l.data_bytes * times));
    scale = case_alloc(r, (size_t)(l.scale_bytes * times));
    amax = case_alloc(r, 4 * (size_t)amaxes);
    if (r->memory_failed) return m;
    if (f->delayed) memory.set(amax, 0, 4 * (size_t)amaxes);
    *m = gmm_mat_quantized(f, direction, data, scale, (float *)amax);
    if (f->scaling != GMM_SCALING_NV16 && f->scaling != GMM_SCALING_TENSOR) m->amax = NULL;
    if (name) {
        case_output_add(r, name, data, (size_t)(l.data_bytes * times));
        case_output_add(r, "scale", scale, (size_t)(l.scale_bytes * times));
        if (m->amax) case_output_add(r, "amax", amax, 4 * (size_t)amaxes);
    }
    return m;
}

const gmm_mat *case_operand(case_run *r, const gmm_format *f, gmm_direction direction, int64_t count, int64_t rows,
                            int64_t cols) {
    static const uint64_t state[2] = { 12345, 678 };
    gmm_mat *src = case_in(r, r->source, count ? count : 1, count ? rows : r->g.capacity, cols), *copy, *root;
    gmm_quantization d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_format format = *f;
    gmm_mat at;
    if (f->dtype == GMM_NONE) return count ? case_tabled(r, src, count, rows, cols) : src;
    if (direction == GMM_COLUMNWISE) format.row_amax = 0;
    copy = case_storage(r, NULL, &format, direction, count, rows, cols);
    if (r->status != GMM_OK) return src;
    at = *copy;
    d.count = (int32_t)count;
    d.rows = count ? rows : 0;
    d.cols = cols;
    d.groups = count ? NULL : &r->g;
    d.options = NULL; /* the engine under test serves the operation; operands are quantized by the best engine */
    d.format = &format;
    d.src = src;
    if (direction == GMM_ROWWISE) d.rowwise = &at;
    else d.columnwise = &at;
    if (f->delayed) d.scale = case_floats(r, count ? count : r->groups, 64.0f, 128.0f);
    if (f->stochastic) d.random = (const uint64_t *)case_put(r, state, sizeof state);
    if (case_check(r, gmm_quantize_query(case_context, GMM_OP_QUANTIZE, &d, &info))) return src;
    (void)case_workspace(r, info.workspace_bytes);
    if (r->status != GMM_OK ||
        case_check(r, gmm_quantize(case_context, &d, r->workspace, r->workspace_bytes, case_stream)))
        return src;
    if (direction == GMM_ROWWISE) return copy;
    root = case_mat(r); /* a columnwise copy is a member of a descriptor whose own elements are not read */
    *root = *copy;
    root->hadamard = 0;
    root->columnwise = copy;
    return root;
}

/* ------------------------------------------------------------------------------------------------------- Splits --- */

/* Sizes of the groups; returns their sum. skew: weight (G - i)^2 as exponential-squared splits have it, thinned. */
static int64_t sizes_of(const case_run *r, int64_t *sizes) {
    const int64_t G = r->groups, T = r->split == SPLIT_NONE ? 0 : r->rows;
    double total = 0.0;
    int64_t sum = 0;
    for (int64_t i = 0; i < G; i++) {
        const double u = (double)(case_hash(7, (uint64_t)i) >> 11) / 9007199254740992.0 + 0.05;
        const int empty = r->split == SPLIT_SKEW && i % 5 == 3;
        total += empty ? 0.0 : r->split == SPLIT_SKEW ? u * u * u : u;
    }
    for (int64_t i = 0; i < G; i++) {
        const double u = (double)(case_hash(7, (uint64_t)i) >> 11) / 9007199254740992.0 + 0.05;
        const int empty = r->split == SPLIT_SKEW && i % 5 == 3;
        int64_t n = (int64_t)((double)T * (empty ? 0.0 : r->split == SPLIT_SKEW ? u * u * u : u) / total);
        if (n > 0) n |= 1; /* odd counts */
        if (r->split == SPLIT_EVEN) n = T / G + (i < T % G);
        if (r->split == SPLIT_ONE) n = i == 0 ? T : 0;
        if (n > T - sum) n = T - sum;
        sizes[i] = n;
        sum += n;
    }
    return sum;
}

static void build_groups(case_run *r) {
    int64_t *sizes = (int64_t *)calloc((size_t)r->groups, sizeof *sizes);
    if (!sizes) {
        (void)case_fail(r, GMM_E_MEMORY, "sizes");
        return;
    }
    r->g.count = (int32_t)r->groups;
    r->g.capacity = sizes_of(r, sizes) + r->past;
    r->g.dtype = GMM_I64;
    r->g.tail = r->flags & CASE_ZEROTAIL ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
    if (r->flags & CASE_HOST) {
        r->offsets = sizes; /* freed with the case */
        r->g.splits = sizes;
        r->g.on_host = 1;
    } else {
        r->g.splits = case_put(r, sizes, (size_t)r->groups * sizeof *sizes);
        free(sizes);
    }
    r->options.engine = r->engine;
    r->options.tile = (int32_t)r->tile;
    r->options.fp8_fast_accum = (r->flags & CASE_FAST) != 0;
}

/* -------------------------------------------------------------------------------------------------------- Cases --- */

int case_begin(const case_setup *s) {
    gmm_config config = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    setup = *s;
    memory = *s->memory;
    case_stream = (gmm_stream)s->stream;
    config.space = s->gpu ? GMM_SPACE_CUDA : GMM_SPACE_CPU;
    config.threads = s->threads;
    config.cpu_level = s->vector_level;
    config.require_engine = s->gpu ? GMM_ENGINE_CUBLASLT : GMM_ENGINE_AUTO; /* is opened here or not at all */
    if (gmm_create(&case_context, &config, &e) == GMM_OK) return CASE_OK;
    config.require_engine = GMM_ENGINE_AUTO; /* the build or the machine lacks it */
    if (gmm_create(&case_context, &config, &e) == GMM_OK) return CASE_OK;
    snprintf(error_text, sizeof error_text, "%s", e.text);
    return CASE_FAILED;
}

void case_end(void) {
    gmm_destroy(case_context);
    case_context = NULL;
}

static int result_of(const case_run *r) {
    return r->status == GMM_OK ? CASE_OK : r->status == GMM_E_UNSUPPORTED ? CASE_DECLINED : CASE_FAILED;
}

int case_open(const char *id, case_run **out) {
    case_run *r = (case_run *)calloc(1, sizeof *r);
    int result;
    *out = NULL;
    if (!r) return CASE_FAILED;
    if (!parse(r, id)) {
        build_groups(r);
        if (r->status == GMM_OK) (void)CASE_OPERATIONS[r->op].open(r);
    }
    result = result_of(r);
    if (result == CASE_OK) *out = r;
    else case_close(r);
    return result;
}

int case_launch(case_run *r) {
    (void)case_check(r, CASE_OPERATIONS[r->op].launch(r, case_stream));
    return result_of(r);
}

int case_outputs(const case_run *r, const case_output **outputs) {
    *outputs = r->outputs;
    return r->output_count;
}

void case_close(case_run *r) {
    if (!r) return;
    free(r->entries);
    free(r->offsets);
    free(r);
}
