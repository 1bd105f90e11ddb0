/* test_select.c - how an engine is chosen where a query knows no addresses, on an engine table of its own: the rule of
   the GPU engines, without a GPU. Holds a second, static copy of the implementation. */
#define GMM_STATIC
#define GMM_IMPLEMENTATION
#include "test.h"

#include <string.h>

/* An engine that needs x at a multiple of 16 bytes, as WGMMA does, and one that takes all addresses. */
enum { PICKY_BYTES = 1024, GENERAL_BYTES = 4096 };
static int picky_plan(const gmm__call *call, gmm__plan *plan) {
    if (!gmm__wgmma_check_alignment(call, GMM__X_, "x", plan)) return 0;
    gmm__reserve(plan, 0, PICKY_BYTES);
    return 1;
}
static int general_plan(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    gmm__reserve(plan, 0, GENERAL_BYTES);
    return 1;
}

static gmm__engine_row row_of(gmm_engine engine, int (*plan)(const gmm__call *call, gmm__plan *plan)) {
    gmm__engine_row row;
    memset(&row, 0, sizeof row);
    row.engine = engine;
    row.space = GMM_SPACE_CPU;
    row.automatic = 1;
    row.ops[GMM_OP_LINEAR_FWD].plan = plan;
    return row;
}

/* A call or query whose x stands at `x`, or has no address. */
typedef struct select_case {
    gmm_engine wanted;
    int query, known;
    int64_t address; /* of x, where it is known */
    gmm_engine want; /* AUTO: refused */
    size_t bytes;
    const char *says, *says_not;
} select_case;

static void one_case(gmm_context *ctx, const gmm__engine_row *rows, size_t count, const select_case *c) {
    static float memory[512];
    const uintptr_t base = ((uintptr_t)memory + 63) / 64 * 64;
    const int64_t sizes[1] = { 4 };
    gmm_groups groups = GMM_ZERO;
    gmm_options options = GMM_ZERO;
    gmm_linear d = GMM_ZERO;
    gmm_mat x = gmm_mat_packed(GMM_BF16, c->known ? (void *)(base + (uintptr_t)c->address) : NULL);
    const gmm_mat w = gmm_mat_packed(GMM_BF16, (void *)base), y = w;
    gmm__call call;
    gmm__plan plan;
    gmm_status s;
    groups.count = 1;
    groups.capacity = 4;
    groups.splits = sizes;
    groups.dtype = GMM_I64;
    options.engine = c->wanted;
    d.in_features = d.out_features = 16;
    d.groups = &groups;
    d.options = &options;
    d.x = &x;
    d.w = &w;
    d.y = &y;
    s = gmm__linear_prepare(&call, ctx, GMM_OP_LINEAR_FWD, "gmm_linear_fwd", &d, c->query);
    T_CHECK(s == GMM_OK, "%s", gmm_last_error(ctx));
    s = gmm__select_from(rows, count, &call, &plan);
    if (c->want == GMM_ENGINE_AUTO) {
        T_CHECK(s == GMM_E_UNSUPPORTED && strstr(gmm_last_error(ctx), c->says), "%d \"%s\"", (int)s,
                gmm_last_error(ctx));
        return;
    }
    T_CHECK(s == GMM_OK, "%s", gmm_last_error(ctx));
    T_CHECK(plan.engine == c->want, "%s: \"%s\"", gmm_engine_name(plan.engine), plan.note);
    T_CHECK(plan.workspace_bytes == c->bytes, "%zu bytes, not %zu", plan.workspace_bytes, c->bytes);
    T_CHECK(!c->says || strstr(plan.note, c->says), "\"%s\" lacks \"%s\"", plan.note, c->says);
    T_CHECK(!c->says_not || !strstr(plan.note, c->says_not), "\"%s\" has \"%s\"", plan.note, c->says_not);
}

static void open_addresses(int arg) {
    const gmm__engine_row rows[2] = { row_of(GMM_ENGINE_WGMMA, picky_plan), row_of(GMM_ENGINE_MMA, general_plan) };
    const select_case both[] = {
        /* a query without addresses promises the better engine, in workspace for either */
        { GMM_ENGINE_AUTO, 1, 0, 0, GMM_ENGINE_WGMMA, GENERAL_BYTES, "multiples of 16 bytes, else mma", NULL },
        { GMM_ENGINE_AUTO, 0, 1, 0, GMM_ENGINE_WGMMA, PICKY_BYTES, NULL, "16 bytes" },
        { GMM_ENGINE_AUTO, 0, 1, 2, GMM_ENGINE_MMA, GENERAL_BYTES, "wgmma needs x at a multiple of 16 bytes", NULL },
        /* one with addresses knows */
        { GMM_ENGINE_AUTO, 1, 1, 32, GMM_ENGINE_WGMMA, PICKY_BYTES, NULL, "16 bytes" },
        { GMM_ENGINE_AUTO, 1, 1, 6, GMM_ENGINE_MMA, GENERAL_BYTES, "wgmma needs x", NULL },
        /* a demand holds on what the query said it depends */
        { GMM_ENGINE_WGMMA, 1, 0, 0, GMM_ENGINE_WGMMA, PICKY_BYTES, "only for addresses at multiples of", NULL },
        { GMM_ENGINE_WGMMA, 0, 1, 16, GMM_ENGINE_WGMMA, PICKY_BYTES, NULL, "16 bytes" },
        { GMM_ENGINE_WGMMA, 0, 1, 8, GMM_ENGINE_AUTO, 0, "needs x at a multiple of 16 bytes", NULL },
        { GMM_ENGINE_MMA, 1, 0, 0, GMM_ENGINE_MMA, GENERAL_BYTES, NULL, "16 bytes" },
    };
    const select_case alone[] = { /* no other engine has the operation, and the query says so */
        { GMM_ENGINE_AUTO, 1, 0, 0, GMM_ENGINE_WGMMA, PICKY_BYTES, "only for addresses at multiples of", NULL },
        { GMM_ENGINE_AUTO, 0, 1, 2, GMM_ENGINE_AUTO, 0, "needs x at a multiple of 16 bytes", NULL },
    };
    gmm_context *ctx = NULL;
    (void)arg;
    T_CHECK(gmm_create(&ctx, NULL, NULL) == GMM_OK, "context");
    for (int i = 0; i < T_COUNT(both); i++) one_case(ctx, rows, 2, &both[i]);
    for (int i = 0; i < T_COUNT(alone); i++) one_case(ctx, rows, 1, &alone[i]);
    gmm_destroy(ctx);
}

void tests_select(void) { t_add_host(open_addresses, 0, "queries without addresses, on engines that need alignment"); }
