/* The NVTX ranges of an implementation with GMM_WITH_NVTX, as a profiler sees them: this program is its own injection,
   which prints the ranges of an MLP's forward, indented by their depth. check.sh compares what it prints. */
#define GMM_WITH_NVTX
#define GMM_IMPLEMENTATION
#include "gmm.h"

#include <stdio.h>

static int depth, most;

static int NVTX_API push(const char *name) {
    printf("%*s%s\n", 2 * depth, "", name);
    most = ++depth > most ? depth : most;
    return depth - 1;
}
static int NVTX_API pop(void) { return --depth; }

static int NVTX_API inject(NvtxGetExportTableFunc_t export_table) {
    const NvtxExportTableCallbacks *table =
        (const NvtxExportTableCallbacks *)export_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable functions;
    unsigned count;
    if (!table || !table->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &count)) return 0;
    *functions[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *functions[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}

int main(void) {
    static _Alignas(256) char workspace[4 << 20];
    static const float x[16], w[64];
    static float y[16];
    const int32_t sizes[2] = {1, 3};
    gmm_context *ctx;
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config mlp = GMM_ZERO;
    gmm_mlp d = GMM_ZERO;
    gmm_config config = GMM_ZERO;
    const gmm_mat mx = gmm_mat_packed(GMM_F32, x), mw = gmm_mat_packed(GMM_F32, w), my = gmm_mat_packed(GMM_F32, y);
    config.threads = 1;
    InitializeInjectionNvtx2_fnptr = inject; /* before the first range */
    if (gmm_create(&ctx, &config, NULL) != GMM_OK) return 1;
    groups.count = 2;
    groups.capacity = 4;
    groups.splits = sizes;
    groups.dtype = GMM_I32;
    mlp.hidden = 4;
    mlp.ffn = 4;
    mlp.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    d.config = &mlp;
    d.groups = &groups;
    d.x = &mx;
    d.w1 = d.w2 = &mw;
    d.y = &my;
    if (gmm_mlp_fwd(ctx, &d, workspace, sizeof workspace, NULL) != GMM_OK) return puts(gmm_last_error(ctx)), 1;
    mlp.hidden = 0; /* a refused call has no range */
    if (gmm_mlp_fwd(ctx, &d, workspace, sizeof workspace, NULL) == GMM_OK) return 1;
    gmm_destroy(ctx);
    return depth != 0 || most != 2;
}
