/* cases_run.h - what cases.c and cases_ops.c share: a parsed case and the functions that make its operands. */
#ifndef GMM_TOOLS_CASES_RUN_H
#define GMM_TOOLS_CASES_RUN_H

#include "cases.h"

#include "gmm.h"

#define CASE_FLAGS(X) \
    X(BIAS, "bias") X(ALPHA, "alpha") X(SCALE, "scale") X(ADD, "add") X(TABLE, "table") X(FROZEN, "frozen") \
    X(MAIN32, "main32") X(STORE32, "store32") X(ZEROTAIL, "zerotail") X(HOST, "hostsplit") X(FAST, "fastaccum") \
    X(PROB, "prob") X(DELAY, "delay") X(CACHED, "cached") X(LIMIT, "limit") X(OSS, "gptoss") \
    X(ROWWISE, "rowwise") X(COLUMNWISE, "columnwise") X(INVERSE, "inverse") X(GROUPED, "grouped") X(DB, "db") \
    X(SIGMOID, "sigmoid") X(NORMALIZE, "normalize") X(AUX, "aux") X(TO32, "to32") X(TO16, "to16") \
    X(ROLE_W, "weight") X(ROLE_GRAD, "grad") X(SAVE_ACT, "saveact") X(SAVE_NOTHING, "savenothing") X(RECENT, "recent")
/* Policies of an MLP with a recipe. */
#define CASE_POLICIES(X) \
    X(SAVE_QUANTIZED, "saveq") X(SAVE_E4M3, "savee4m3") X(WEIGHT_CACHE, "weightcache") X(BACKWARD_HIGH, "bwdhigh") \
    X(BACKWARD_DEQUANTIZED, "bwddeq")

enum {
#define CASE_BIT(name, word) CASE_BIT_##name,
    CASE_FLAGS(CASE_BIT)
    CASE_BITS
};
enum {
    CASE_POLICIES(CASE_BIT)
    CASE_POLICY_BITS
};
#undef CASE_BIT
#define CASE_VALUE(name, word) CASE_##name = 1u << CASE_BIT_##name,
enum { CASE_FLAGS(CASE_VALUE) CASE_POLICIES(CASE_VALUE) CASE_NO_FLAG = 0 };
#undef CASE_VALUE

enum { CASE_MATS = 24, CASE_OUTPUTS = 12 };

struct case_run {
    char id[192];
    uint64_t seed;
    /* parsed */
    int op;                 /* index in the table of operations */
    uint32_t flags, policies;
    gmm_dtype source;
    gmm_recipe recipe;      /* formats of input, weight and grad; dtype 0 = not quantized */
    int quantized;
    int act;                /* value of gmm_act_kind */
    gmm_engine engine;
    int split;
    int64_t groups, rows, K, N, past, top, align, block, count, tile;
    /* built */
    gmm_groups g;
    gmm_options options;
    gmm_mat mats[CASE_MATS];
    int mat_count;
    case_output outputs[CASE_OUTPUTS];
    int output_count;
    gmm_status status;      /* of the first failing call */
    int memory_failed;
    void *workspace;
    size_t workspace_bytes;
    gmm_grad grads[4];
    gmm_act activation;
    gmm_mlp_config config;
    gmm_mlp_quant quant;
    gmm_wgrad_entry *entries;
    gmm_wgrad_queue queue;
    gmm_format format;
    union {
        gmm_linear linear;
        gmm_activation act;
        gmm_mlp mlp;
        gmm_route route;
        gmm_permute permute;
#ifndef CASE_FORMER_LAYER
        struct { gmm_moe moe; gmm_mlp mlp; gmm_route route; } layer;
#endif
        gmm_padding pad;
        gmm_glu glu;
        gmm_quantization quantize;
        gmm_dequantization dequantize;
        gmm_transposition transpose;
        gmm_scale_update update;
        gmm_sharding shard;
        gmm_accumulation accumulate;
        gmm_conversion convert;
    } d;
    int64_t *offsets;
};

/* A row of the table of operations. */
typedef struct case_operation {
    const char *family, *name;
    int (*open)(case_run *r);                        /* 0 = built */
    gmm_status (*launch)(case_run *r, gmm_stream s);
} case_operation;
extern const case_operation CASE_OPERATIONS[];

extern gmm_context *case_context;
extern gmm_stream case_stream;

/* Fails the case with a text; returns nonzero. */
int case_fail(case_run *r, gmm_status status, const char *text);
/* Keeps the first failure of a library call; returns nonzero if it failed. */
int case_check(case_run *r, gmm_status status);

void *case_alloc(case_run *r, size_t bytes);                     /* poisoned */
void *case_put(case_run *r, const void *host, size_t bytes);     /* a copy in the context's memory */
void *case_out(case_run *r, const char *name, size_t bytes);     /* poisoned; becomes an output */
void case_output_add(case_run *r, const char *name, const void *data, size_t bytes);
float *case_floats(case_run *r, int64_t n, float low, float high);
gmm_mat *case_mat(case_run *r);                                  /* a zeroed descriptor that lives with the case */
/* Random values in [-1, 1) of a 16- or 32-bit dtype: `count` matrices of rows x cols. */
gmm_mat *case_in(case_run *r, gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols);
gmm_mat *case_mat_out(case_run *r, const char *name, gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols);
/* The descriptor in pointer-table form, if the case has the flag TABLE. */
gmm_mat *case_tabled(case_run *r, gmm_mat *m, int64_t count, int64_t rows, int64_t cols);
/* A quantized copy's storage, as an output if `name` is set; activations if count is 0. */
gmm_mat *case_storage(case_run *r, const char *name, const gmm_format *f, gmm_direction direction, int64_t count,
                      int64_t rows, int64_t cols);
/* An operand without quantization, or its copy with blocks along `direction`, made by the library. */
const gmm_mat *case_operand(case_run *r, const gmm_format *f, gmm_direction direction, int64_t count, int64_t rows,
                            int64_t cols);
void *case_workspace(case_run *r, size_t bytes); /* one workspace for all calls of the case; it grows */
int64_t case_bytes(gmm_dtype dtype);
uint64_t case_hash(uint64_t seed, uint64_t i);

#endif
