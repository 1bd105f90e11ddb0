/* A grouped linear layer: every row is multiplied by the weight of its own group.
   Three groups with 2, 0 and 3 rows share one call; their sizes are data, not arguments. */
#include "gmm.h"

#include <stdio.h>
#include <stdlib.h>

enum { GROUPS = 3, ROWS = 5, IN = 4, OUT = 3 };

static int failed(gmm_status status, const gmm_context *ctx) {
    if (status != GMM_OK) fprintf(stderr, "%s: %s\n", gmm_status_name(status), gmm_last_error(ctx));
    return status != GMM_OK;
}

int main(void) {
    gmm_context *ctx;
    const int32_t sizes[GROUPS] = {2, 0, 3};
    uint16_t x[ROWS * IN], w[GROUPS * OUT * IN]; /* bf16 */
    float y[ROWS * OUT];                         /* the output may have another dtype: fp32 */
    int i, j;

    for (i = 0; i < ROWS * IN; i++) x[i] = gmm_f32_to_bf16((float)(i % IN));
    for (i = 0; i < GROUPS * OUT * IN; i++) w[i] = gmm_f32_to_bf16((float)(1 + i / (OUT * IN))); /* 1, 2, 3 by group */

    gmm_error error;
    if (gmm_create(&ctx, NULL, &error) != GMM_OK) { /* NULL: a CPU context with all defaults */
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }

    gmm_groups groups = GMM_ZERO;
    groups.count = GROUPS;
    groups.capacity = ROWS;
    groups.splits = sizes;
    groups.dtype = GMM_I32;

    gmm_mat mx = gmm_mat_packed(GMM_BF16, x), mw = gmm_mat_packed(GMM_BF16, w), my = gmm_mat_packed(GMM_F32, y);
    gmm_linear linear = GMM_ZERO;
    linear.groups = &groups;
    linear.in_features = IN;
    linear.out_features = OUT;
    linear.x = &mx;
    linear.w = &mw;
    linear.y = &my;

    /* the caller provides the workspace: query its size, then pass it */
    gmm_info info = GMM_ZERO;
    if (failed(gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &linear, &info), ctx)) return 1;
    void *workspace = aligned_alloc(256, (info.workspace_bytes + 255) / 256 * 256 + 256);
    if (!workspace || failed(gmm_linear_fwd(ctx, &linear, workspace, info.workspace_bytes, NULL), ctx)) return 1;

    printf("engine %s, %zu bytes of workspace\n", gmm_engine_name(info.engine), info.workspace_bytes);
    for (i = 0; i < ROWS; i++) {
        printf("row %d:", i);
        for (j = 0; j < OUT; j++) printf(" %5.1f", (double)y[i * OUT + j]);
        printf("\n");
    }
    free(workspace);
    gmm_destroy(ctx);
    return y[0] == 6.0f && y[ROWS * OUT - 1] == 18.0f ? 0 : 1; /* (0+1+2+3) times 1, times 3 */
}
