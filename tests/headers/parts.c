/* Calls a function of every header, for parts.sh: the operations, checkpoint plans and shard plans of a split
   implementation are in different units. With WITHOUT_QUANT the build has GMM_NO_QUANT. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gmm.h"
#include "gmm_gtp.h"

static int failures;
#define CHECK(condition) \
    do { if (!(condition)) { printf("parts.c:%d: %s\n", __LINE__, #condition); failures++; } } while (0)

/* y = x w^T of one group with one row, K = N = 16, in bf16: x is 1, w is 2, so that y is 32. */
static void multiplies(gmm_context *ctx, gmm_scaling scaling) {
    static uint16_t x[16], w[16 * 16], y[16];
    static float scale = 1.0f, amax = 1.0f;
    const int32_t one = 1;
    uint32_t fault = 0;
    gmm_groups groups = GMM_ZERO;
    gmm_linear l = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_mat mx = gmm_mat_packed(GMM_BF16, x), mw = gmm_mat_packed(GMM_BF16, w), my = gmm_mat_packed(GMM_BF16, y);
    gmm_status s;
    void *workspace;
    int i;
    for (i = 0; i < 16; i++) x[i] = gmm_f32_to_bf16(1.0f);
    for (i = 0; i < 16 * 16; i++) w[i] = gmm_f32_to_bf16(2.0f);
    if (scaling != GMM_SCALING_NONE) {
        mx.dtype = mw.dtype = GMM_E4M3;
        mx.scaling = mw.scaling = scaling;
        mx.scale = mw.scale = &scale;
        mx.amax = mw.amax = &amax;
    }
    groups.count = 1;
    groups.capacity = 1;
    groups.splits = &one;
    groups.dtype = GMM_I32;
    groups.fault = &fault;
    l.groups = &groups;
    l.in_features = l.out_features = 16;
    l.x = &mx;
    l.w = &mw;
    l.y = &my;
    s = gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &l, &info);
#ifdef WITHOUT_QUANT
    if (scaling != GMM_SCALING_NONE) {
        CHECK(s == GMM_E_BUILD);
        CHECK(strstr(gmm_last_error(ctx), "linear") && strstr(gmm_last_error(ctx), "(GMM_NO_QUANT)"));
        return;
    }
#endif
    CHECK(s == GMM_OK);
    workspace = malloc(info.workspace_bytes + 256);
    if (!workspace) exit(1);
    s = gmm_linear_fwd(ctx, &l, (void *)(((uintptr_t)workspace + 255) / 256 * 256), info.workspace_bytes, NULL);
    CHECK(s == GMM_OK && fault == 0);
    if (scaling == GMM_SCALING_NONE)
        for (i = 0; i < 16; i++) CHECK(gmm_bf16_to_f32(y[i]) == 32.0f);
    free(workspace);
}

/* An MLP without a recipe, whose forward saves FC1's output as E4M3. */
static void saves_e4m3(gmm_context *ctx) {
    const gmm_mat mat = gmm_mat_packed(GMM_BF16, NULL);
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_status s;
    groups.count = 1;
    groups.capacity = 1;
    groups.dtype = GMM_I32;
    config.hidden = config.ffn = 16;
    config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    config.save = GMM_SAVE_PREACT_E4M3;
    mlp.config = &config;
    mlp.groups = &groups;
    mlp.x = mlp.w1 = mlp.w2 = mlp.y = &mat;
    s = gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &info);
#ifdef WITHOUT_QUANT
    CHECK(s == GMM_E_BUILD);
    CHECK(strstr(gmm_last_error(ctx), "mlp: FP8") && strstr(gmm_last_error(ctx), "(GMM_NO_QUANT)"));
#else
    CHECK(s == GMM_OK);
#endif
}

int main(void) {
    gmm_context *ctx = NULL;
    gmm_layout layout = GMM_ZERO;
    gmm_ckpt_table *table = NULL;
    gmm_shard shard = GMM_ZERO;
    gmm_shard_plan plan = GMM_ZERO;
    CHECK(gmm_create(&ctx, NULL, NULL) == GMM_OK);
    if (!ctx) return 1;
    multiplies(ctx, GMM_SCALING_NONE);
    multiplies(ctx, GMM_SCALING_TENSOR);
    saves_e4m3(ctx);
    CHECK(gmm_layout_of(GMM_E4M3, GMM_SCALING_MX32, GMM_SCALES_COMPACT, GMM_ROWWISE, 32, 32, &layout, NULL) == GMM_OK);
    CHECK(gmm_ckpt_table_create(&table, NULL, NULL) == GMM_OK);
    gmm_ckpt_table_destroy(table);
    CHECK(gmm_gtp_unit(GMM_SCALING_MX32) > 0);
    CHECK(gmm_gtp_plan(&shard, &plan, NULL) != GMM_OK); /* a weight without rows */
    gmm_destroy(ctx);
    return failures != 0;
}
