/* Own host memory and own log for a context: both are functions in its configuration, with a user pointer. The
   allocator serves contexts; operations allocate nothing, they use the workspace that they are given. */
#include "gmm.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct counter { int live, calls; } counter;

static void *count_alloc(void *user, size_t bytes) {
    counter *c = (counter *)user;
    c->live++;
    c->calls++;
    return malloc(bytes);
}

static void count_release(void *user, void *memory) {
    ((counter *)user)->live--;
    free(memory);
}

static void write_log(void *user, gmm_log_level level, const char *message) {
    fprintf((FILE *)user, "[%s] %s\n", level == GMM_LOG_WARN ? "warn" : level == GMM_LOG_INFO ? "info" : "trace",
            message);
}

int main(void) {
    counter memory = {0, 0};
    gmm_context *ctx;
    gmm_error error;
    gmm_config config = GMM_ZERO;
    config.threads = 1;
    config.allocator.user = &memory;
    config.allocator.alloc = count_alloc;
    config.allocator.release = count_release;
    config.log.user = stdout;
    config.log.level = GMM_LOG_TRACE; /* logs contexts, and the engine of every operation */
    config.log.write = write_log;
    if (gmm_create(&ctx, &config, &error) != GMM_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }

    /* y = w x for one group of one row */
    const int32_t size = 1;
    const float x[2] = {3.0f, 4.0f}, w[2] = {10.0f, 100.0f};
    float y = 0.0f;
    gmm_mat mx = gmm_mat_packed(GMM_F32, x), mw = gmm_mat_packed(GMM_F32, w), my = gmm_mat_packed(GMM_F32, &y);
    gmm_groups groups = GMM_ZERO;
    groups.count = 1;
    groups.capacity = 1;
    groups.splits = &size;
    groups.dtype = GMM_I32;
    gmm_linear linear = GMM_ZERO;
    linear.groups = &groups;
    linear.in_features = 2;
    linear.out_features = 1;
    linear.x = &mx;
    linear.w = &mw;
    linear.y = &my;
    gmm_info info = GMM_ZERO;
    gmm_status status = gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &linear, &info);
    void *workspace = aligned_alloc(256, (info.workspace_bytes + 255) / 256 * 256 + 256);
    int before = memory.calls;
    if (status == GMM_OK) status = gmm_linear_fwd(ctx, &linear, workspace, info.workspace_bytes, NULL);
    if (status != GMM_OK) fprintf(stderr, "%s\n", gmm_last_error(ctx));
    int during = memory.calls - before;

    /* an error, to show how it is reported */
    linear.out_features = 0;
    gmm_status refused = gmm_linear_fwd(ctx, &linear, workspace, info.workspace_bytes, NULL);
    printf("refused with %s: %s\n", gmm_status_name(refused), gmm_last_error(ctx));

    free(workspace);
    gmm_destroy(ctx);
    printf("y = %.0f; %d allocations, %d of them by the operation, %d left\n", (double)y, memory.calls, during,
           memory.live);
    return status == GMM_OK && refused == GMM_E_ARG && y == 430.0f && during == 0 && memory.live == 0 ? 0 : 1;
}
