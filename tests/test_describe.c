/* test_describe.c - gmm_describe: what it says is what queries and launches do */
#include "device.h"
#include "linear_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT = 8192 };

/* The text of a call, which must succeed. */
static void describe(gmm_op op, const void *descriptor, char text[TEXT]) {
    memset(text, '#', TEXT);
    T_OK(gmm_describe(T.ctx, op, descriptor, text, TEXT));
    T_CHECK(memchr(text, 0, TEXT) && strlen(text) < TEXT - 1, "text does not end");
    T_CHECK(text[0] && text[strlen(text) - 1] == '\n', "last line: %s", text);
}

/* The first line has operation, engine, workspace and note of the query. */
static void agrees(gmm_op op, const char *text, const gmm_info *info) {
    char begin[128], bytes[64];
    (void)snprintf(begin, sizeof begin, "%s: engine %s", gmm_op_name(op), gmm_engine_name(info->engine));
    (void)snprintf(bytes, sizeof bytes, ", workspace %zu bytes", info->workspace_bytes);
    T_CHECK(!strncmp(text, begin, strlen(begin)), "want %s, got %s", begin, text);
    T_CHECK(strstr(text, bytes) && strstr(text, bytes) < strchr(text, '\n'), "want %s, got %s", bytes, text);
    T_CHECK(strstr(text, info->note), "want %s, got %s", info->note, text);
}

/* A linear layer: the kernel that the text names is in the graph that captures the call. */
static void linear(int arg) {
    static const int64_t sizes[] = {30, 0, 45};
    const lin_spec s = {.op = (gmm_op)(GMM_OP_LINEAR_FWD + arg % 4), .in = arg < 4 ? GMM_BF16 : GMM_F32,
                        .out = arg < 4 ? GMM_BF16 : GMM_F32, .groups = 3, .K = 64, .N = 32, .sizes = sizes};
    gmm_info info = GMM_ZERO;
    char text[TEXT], kernel[128];
    const char *at;
    lin_run r;
    lin_build(&r, &s);
    describe(s.op, &r.d, text);
    T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &info));
    agrees(s.op, text, &info);
    T_CHECK(strstr(text, "G=3") && strstr(text, "K=64") && strstr(text, "N=32"), "shapes: %s", text);
    T_CHECK(strchr(text, '\n')[1] == 0, "more than one line: %s", text);
    at = strstr(text, ", kernel ");
    T_CHECK(!at == (s.op == GMM_OP_LINEAR_BGRAD), "kernel: %s", text);
#ifdef HAVE_CUDA
    if (at && T.gpu) {
        void *workspace = t_workspace(info.workspace_bytes);
        const char *error;
        gmm_status status;
        int kernels, named;
        T_CHECK(sscanf(at, ", kernel %127[^,]", kernel) == 1, "%s", text);
        T_CHECK(!(error = device_begin_capture()), "begin: %s", error);
        status = t_linear_functions[s.op - GMM_OP_LINEAR_FWD](T.ctx, &r.d, workspace, info.workspace_bytes, T.stream);
        error = device_end_capture_counted(kernel, &kernels, &named);
        T_CHECK(status == GMM_OK && !error, "%s %s", gmm_last_error(T.ctx), error ? error : "");
        T_CHECK(named == 1, "%d of %d captured kernels are %s", named, kernels, kernel);
    }
#else
    (void)kernel;
#endif
}

/* An MLP: one indented line for each step, in their order. */
static void mlp(int arg) {
    static const char *const steps[2] = { "linear_fwd act_fwd linear_fwd ",
                                          "quantize quantize linear_fwd act_fwd quantize quantize linear_fwd " };
    /* the activation may be part of FC1's product, or of the cast of its result */
    static const char *const joined[2] = { "linear_fwd linear_fwd ",
                                           "quantize quantize linear_fwd quantize quantize linear_fwd " };
    const gmm_recipe recipe = gmm_recipe_of(GMM_RECIPE_FP8_BLOCK);
    const gmm_mat m = gmm_mat_packed(GMM_BF16, NULL);
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_mlp_quant quant = GMM_ZERO;
    gmm_mlp d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    char text[TEXT], found[512] = "", name[32];
    const char *line;
    groups.count = 3;
    groups.capacity = 512;
    groups.dtype = GMM_I32;
    config.hidden = 256;
    config.ffn = 128;
    config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    d.config = &config;
    d.groups = &groups;
    d.x = d.w1 = d.w2 = d.y = &m;
    if (arg) {
        config.recipe = recipe.kind;
        quant.recipe = &recipe;
        d.quant = &quant;
    }
    describe(GMM_OP_MLP_FWD, &d, text);
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &d, &info));
    agrees(GMM_OP_MLP_FWD, text, &info);
    for (line = strchr(text, '\n') + 1; *line; line = strchr(line, '\n') + 1) {
        const size_t used = strlen(found);
        T_CHECK(sscanf(line, "  %31[a-z_]: engine ", name) == 1, "a line of %s", text);
        (void)snprintf(found + used, sizeof found - used, "%s ", name);
    }
    T_CHECK(!strcmp(found, steps[arg]) || (T.gpu && !strcmp(found, joined[arg])), "steps %s: %s", found, text);
}

/* Text that does not fit is cut off; no byte behind `bytes` is written. */
static void cut(int arg) {
    static const int64_t sizes[] = {3};
    const lin_spec s = {.op = GMM_OP_LINEAR_FWD, .groups = 1, .K = 8, .N = 8, .sizes = sizes};
    char whole[TEXT], text[TEXT];
    size_t bytes;
    lin_run r;
    (void)arg;
    lin_build(&r, &s);
    describe(s.op, &r.d, whole);
    for (bytes = 1; bytes <= strlen(whole) + 2; bytes++) {
        const size_t length = bytes - 1 < strlen(whole) ? bytes - 1 : strlen(whole);
        memset(text, '#', sizeof text);
        T_OK(gmm_describe(T.ctx, s.op, &r.d, text, bytes));
        T_CHECK(strlen(text) == length && !strncmp(text, whole, length), "%zu bytes: %.*s", bytes, (int)bytes, text);
        T_CHECK(text[bytes] == '#', "byte %zu of %zu", bytes, bytes);
    }
}

/* Every operation that has a query has a description, and refuses a NULL descriptor by its name; others have none. */
static void operations(int arg) {
    char text[TEXT];
    gmm_op op;
    (void)arg;
    for (op = (gmm_op)0; op < GMM_OP_COUNT; op = (gmm_op)(op + 1)) {
        const int none = op == GMM_OP_SCALE_UPDATE || op == GMM_OP_SHARD_CAST || op == GMM_OP_OFFSETS ||
                         op == GMM_OP_ROUTE_FROM_DENSE || op == GMM_OP_ROUTE_TO_DENSE || op == GMM_OP_EXPERT_BIAS;
        if (none)
            T_REFUSED(GMM_E_ARG, gmm_describe(T.ctx, op, NULL, text, TEXT), "gmm_describe: op", "no query", NULL);
        else
            T_REFUSED(GMM_E_NULL, gmm_describe(T.ctx, op, NULL, text, TEXT), "gmm_describe: ", "is NULL", NULL);
    }
    T_REFUSED(GMM_E_ARG, gmm_describe(T.ctx, GMM_OP_COUNT, NULL, text, TEXT), "gmm_describe: op", "no query", NULL);
}

/* What a query refuses is refused, with the reason of the engine that is demanded. */
static void refused(int arg) {
    static const int64_t sizes[] = {3};
    const lin_spec s = {.op = GMM_OP_LINEAR_FWD, .groups = 1, .K = 8, .N = 8, .sizes = sizes};
    char text[TEXT];
    lin_run r;
    (void)arg;
    lin_build(&r, &s);
    T_REFUSED(GMM_E_NULL, gmm_describe(T.ctx, s.op, &r.d, NULL, 8), "gmm_describe: text", "is NULL", NULL);
    T_REFUSED(GMM_E_NULL, gmm_describe(T.ctx, s.op, &r.d, text, 0), "gmm_describe: text", "no bytes", NULL);
    r.options.engine = T.gpu ? GMM_ENGINE_CPU : GMM_ENGINE_MMA;
    r.d.options = &r.options;
    T_REFUSED(GMM_E_UNSUPPORTED, gmm_describe(T.ctx, s.op, &r.d, text, sizeof text), "gmm_describe: ",
              T.gpu ? "cpu" : "mma", NULL);
    r.d.options = NULL;
    r.d.in_features = 0;
    T_REFUSED(GMM_E_ARG, gmm_describe(T.ctx, s.op, &r.d, text, sizeof text), "linear.in_features", "0 must be", NULL);
}

void tests_describe(void) {
    for (int i = 0; i < 8; i++)
        t_add(linear, i, "describe %s %s", gmm_op_name((gmm_op)(GMM_OP_LINEAR_FWD + i % 4)), i < 4 ? "bf16" : "f32");
    for (int i = 0; i < 2; i++) t_add(mlp, i, "describe mlp_fwd%s", i ? " fp8" : "");
    t_add(cut, 0, "describe into few bytes");
    t_add(operations, 0, "describe every operation");
    t_add(refused, 0, "describe what is refused");
}
