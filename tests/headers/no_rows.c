/* no_rows.c - linear operations without rows, whose token matrices are NULL, and with quantized operands, whose
   elements are not addressed as floats; backward of a router whose sequence_counts are NULL: check.sh runs it under
   clang's UndefinedBehaviorSanitizer. */
#define GMM_IMPLEMENTATION
#include "gmm.h"

#include <stdio.h>

enum { K = 600, N = 700, ROWS = 3, Q = 32 };

static gmm_status run(gmm_context *ctx, int op, const gmm_linear *linear) {
    static gmm_status (*const calls[])(gmm_context *, const gmm_linear *, void *, size_t, gmm_stream) = {
        gmm_linear_fwd, gmm_linear_dgrad, gmm_linear_wgrad, gmm_linear_bgrad};
    gmm_info info = GMM_ZERO;
    void *workspace = NULL;
    gmm_status s = gmm_linear_query(ctx, (gmm_op)(GMM_OP_LINEAR_FWD + op), linear, &info);
    if (s == GMM_OK) workspace = aligned_alloc(256, (info.workspace_bytes / 256 + 1) * 256);
    if (s == GMM_OK) s = workspace ? calls[op](ctx, linear, workspace, info.workspace_bytes, NULL) : GMM_E_MEMORY;
    if (s != GMM_OK) printf("%s\n", gmm_last_error(ctx));
    free(workspace);
    return s;
}

/* Without the auxiliary loss no counts are read. */
static gmm_status route(gmm_context *ctx) {
    enum { TOKENS = 6, EXPERTS = 4 };
    static float logits[TOKENS * EXPERTS], dlogits[TOKENS * EXPERTS], dprobs[TOKENS];
    static int32_t indices[TOKENS];
    const gmm_mat ml = gmm_mat_packed(GMM_F32, logits), md = gmm_mat_packed(GMM_F32, dlogits);
    gmm_info info = GMM_ZERO;
    gmm_route r = GMM_ZERO;
    void *workspace = NULL;
    gmm_status s;
    r.experts = EXPERTS;
    r.tokens = TOKENS;
    r.topk = 1;
    r.sequences = 3;
    r.scale = 1.0f;
    r.logits = &ml;
    r.dlogits = &md;
    r.indices = indices;
    r.dprobs = dprobs;
    s = gmm_topk_query(ctx, GMM_OP_TOPK_BWD, &r, &info);
    if (s == GMM_OK) workspace = aligned_alloc(256, (info.workspace_bytes / 256 + 1) * 256);
    if (s == GMM_OK)
        s = workspace ? gmm_topk_bwd(ctx, &r, workspace, info.workspace_bytes, NULL) : GMM_E_MEMORY;
    if (s != GMM_OK) printf("%s\n", gmm_last_error(ctx));
    free(workspace);
    return s;
}

int main(void) {
    static float w[2 * N * K], dw[2 * N * K], db[2 * N], y[ROWS * Q];
    static unsigned char codes[2 * Q * Q], scales[1 << 12];
    const int32_t none[2] = {0, 0}, some[2] = {0, ROWS};
    const gmm_mat empty = gmm_mat_packed(GMM_F32, NULL), mw = gmm_mat_packed(GMM_F32, w);
    const gmm_mat mdw = gmm_mat_packed(GMM_F32, dw), mdb = gmm_mat_packed(GMM_F32, db);
    gmm_mat my = gmm_mat_packed(GMM_F32, y), mq = gmm_mat_packed(GMM_E4M3, codes);
    gmm_grad gw = GMM_ZERO, gb = GMM_ZERO;
    gmm_groups groups = GMM_ZERO;
    gmm_linear linear = GMM_ZERO;
    gmm_context *ctx;
    int op;
    if (gmm_create(&ctx, NULL, NULL) != GMM_OK) return 1;
    groups.count = 2;
    groups.splits = none;
    groups.dtype = GMM_I32;
    gw.mat = &mdw;
    gb.mat = &mdb;
    linear.groups = &groups;
    linear.in_features = K;
    linear.out_features = N;
    linear.x = linear.y = linear.dx = linear.dy = &empty;
    linear.w = &mw;
    linear.dw = &gw;
    linear.db = &gb;
    dw[2 * N * K - 1] = db[2 * N - 1] = 1.0f;
    for (op = 0; op < 4; op++)
        if (run(ctx, op, &linear) != GMM_OK) return 1;
    if (dw[2 * N * K - 1] != 0.0f || db[2 * N - 1] != 0.0f) return 1;
    groups.capacity = ROWS;
    groups.splits = some;
    mq.scaling = GMM_SCALING_MX32;
    mq.scale = scales;
    linear.in_features = linear.out_features = Q;
    linear.x = linear.w = &mq;
    linear.y = &my;
    if (run(ctx, 0, &linear) != GMM_OK || route(ctx) != GMM_OK) return 1;
    gmm_destroy(ctx);
    return 0;
}
