/* test_select.c - how an engine is chosen for a query without addresses, with an engine table of its own: the rule of
   the GPU engines, without a GPU. Contains a second, static copy of the implementation. */
#define GMM_STATIC
#define GMM_IMPLEMENTATION
#include "test.h"

#include <string.h>

/* An engine that needs x at a multiple of 16 bytes, as WGMMA does, and one that accepts all addresses. */
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

static unsigned char honoured[2][GMM__FIELDS]; /* by all rows, and by one that lacks a field */

static gmm__engine_row row_of(gmm_engine engine, int (*plan)(const gmm__call *call, gmm__plan *plan)) {
    gmm__engine_row row;
    memset(&row, 0, sizeof row);
    row.engine = engine;
    row.space = GMM_SPACE_CPU;
    row.automatic = 1;
    memset(honoured, 1, sizeof honoured);
    row.honours = honoured[0];
    row.ops[GMM_OP_LINEAR_FWD].plan = plan;
    return row;
}

/* A call or query with x at `address`, or without an address. */
typedef struct select_case {
    gmm_engine wanted;
    int query, known;
    int64_t address; /* of x, if `known` */
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
#define one_case(...) T_CALL(one_case, __VA_ARGS__)

static void open_addresses(int arg) {
    const gmm__engine_row rows[2] = { row_of(GMM_ENGINE_WGMMA, picky_plan), row_of(GMM_ENGINE_MMA, general_plan) };
    const select_case both[] = {
        /* a query without addresses promises the better engine, in workspace for either */
        { GMM_ENGINE_AUTO, 1, 0, 0, GMM_ENGINE_WGMMA, GENERAL_BYTES, "multiples of 16 bytes, else mma", NULL },
        { GMM_ENGINE_AUTO, 0, 1, 0, GMM_ENGINE_WGMMA, PICKY_BYTES, NULL, "16 bytes" },
        { GMM_ENGINE_AUTO, 0, 1, 2, GMM_ENGINE_MMA, GENERAL_BYTES, "wgmma needs x at a multiple of 16 bytes", NULL },
        /* a query with addresses is exact */
        { GMM_ENGINE_AUTO, 1, 1, 32, GMM_ENGINE_WGMMA, PICKY_BYTES, NULL, "16 bytes" },
        { GMM_ENGINE_AUTO, 1, 1, 6, GMM_ENGINE_MMA, GENERAL_BYTES, "wgmma needs x", NULL },
        /* a demanded engine is promised under the condition that the query reports */
        { GMM_ENGINE_WGMMA, 1, 0, 0, GMM_ENGINE_WGMMA, PICKY_BYTES, "only for addresses at multiples of", NULL },
        { GMM_ENGINE_WGMMA, 0, 1, 16, GMM_ENGINE_WGMMA, PICKY_BYTES, NULL, "16 bytes" },
        { GMM_ENGINE_WGMMA, 0, 1, 8, GMM_ENGINE_AUTO, 0, "needs x at a multiple of 16 bytes", NULL },
        { GMM_ENGINE_MMA, 1, 0, 0, GMM_ENGINE_MMA, GENERAL_BYTES, NULL, "16 bytes" },
    };
    const select_case alone[] = { /* no other engine serves the operation; the query names the condition */
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

/* Optional fields of a forward or of a weight gradient, and the reason with which an engine without them declines. */
typedef struct field_case {
    int field;
    gmm_op op;
    const char *name;
} field_case;
static const field_case field_cases[] = {
    { GMM__FIELD_ALPHA, GMM_OP_LINEAR_FWD, "linear.alpha" },
    { GMM__FIELD_ALPHA_PER_GROUP, GMM_OP_LINEAR_FWD, "linear.alpha_per_group" },
    { GMM__FIELD_BIAS, GMM_OP_LINEAR_FWD, "linear.bias" },
    { GMM__FIELD_BIAS_SCALE, GMM_OP_LINEAR_FWD, "linear.bias_scale" },
    { GMM__FIELD_LINEAR_PROB, GMM_OP_LINEAR_FWD, "linear.prob" },
    { GMM__FIELD_INDEX, GMM_OP_LINEAR_FWD, "linear.x_index, dy_index" },
    { GMM__FIELD_INDEX, GMM_OP_LINEAR_WGRAD, "linear.x_index, dy_index" },
    { GMM__FIELD_Y_ADD, GMM_OP_LINEAR_FWD, "linear.y_add" },
    { GMM__FIELD_GROUPS_TAIL, GMM_OP_LINEAR_FWD, "groups.tail" },
    { GMM__FIELD_GROUPS_FAULT, GMM_OP_LINEAR_FWD, "groups.fault" },
    { GMM__FIELD_SM_LIMIT, GMM_OP_LINEAR_FWD, "options.sm_limit" },
    { GMM__FIELD_FAST_ACCUM, GMM_OP_LINEAR_FWD, "options.fp8_fast_accum" },
    { GMM__FIELD_WORKSPACE_LIMIT, GMM_OP_LINEAR_FWD, "options.workspace_limit" },
    { GMM__FIELD_MAIN_GRAD, GMM_OP_LINEAR_WGRAD, "grad.main_grad" },
    { GMM__FIELD_GRAD_BETA, GMM_OP_LINEAR_WGRAD, "grad.beta" },
    { GMM__FIELD_GRAD_FROZEN, GMM_OP_LINEAR_WGRAD, "grad.frozen" },
};

/* The call of a case: it sets the case's field, and those that the field needs. */
static gmm_status field_call(gmm_context *ctx, const field_case *c, gmm_engine wanted, int query, gmm__call *call) {
    static float memory[2048], values[8];
    static uint32_t fault;
    static const uint8_t frozen[1] = { 0 };
    static const int64_t sizes[1] = { 4 };
    const int f = c->field;
    gmm_groups groups = GMM_ZERO;
    gmm_options options = GMM_ZERO;
    gmm_linear d = GMM_ZERO;
    gmm_grad dw = GMM_ZERO;
    const gmm_mat x = gmm_mat_packed(GMM_BF16, memory), y = gmm_mat_packed(GMM_BF16, memory + 512);
    const gmm_mat w = gmm_mat_packed(GMM_BF16, memory + 1024), bias = gmm_mat_packed(GMM_F32, memory + 1536);
    groups.count = 1;
    groups.capacity = 4;
    groups.splits = sizes;
    groups.dtype = GMM_I64;
    if (f == GMM__FIELD_GROUPS_TAIL) groups.tail = GMM_TAIL_ZERO;
    if (f == GMM__FIELD_GROUPS_FAULT) groups.fault = &fault;
    options.engine = wanted;
    options.sm_limit = f == GMM__FIELD_SM_LIMIT ? 3 : 0;
    options.fp8_fast_accum = f == GMM__FIELD_FAST_ACCUM;
    options.workspace_limit = f == GMM__FIELD_WORKSPACE_LIMIT ? 1 << 20 : 0;
    d.in_features = d.out_features = 16;
    d.groups = &groups;
    d.options = &options;
    d.x = &x;
    d.w = &w;
    d.y = &y;
    d.dy = &y;
    d.dw = &dw;
    dw.mat = &w;
    dw.main_grad = f == GMM__FIELD_MAIN_GRAD;
    if (f == GMM__FIELD_GRAD_BETA) dw.beta = values;
    if (f == GMM__FIELD_GRAD_FROZEN) dw.frozen = frozen;
    if (f == GMM__FIELD_ALPHA || f == GMM__FIELD_ALPHA_PER_GROUP) d.alpha = values;
    d.alpha_per_group = f == GMM__FIELD_ALPHA_PER_GROUP;
    if (f == GMM__FIELD_BIAS || f == GMM__FIELD_BIAS_SCALE) d.bias = &bias;
    if (f == GMM__FIELD_BIAS_SCALE) d.bias_scale = values;
    if (f == GMM__FIELD_LINEAR_PROB) d.prob = values;
    if (f == GMM__FIELD_INDEX) {
        if (c->op == GMM_OP_LINEAR_FWD) d.x_index = (const int32_t *)(const void *)values;
        d.dy_index = (const int32_t *)(const void *)values;
        d.index_rows = 4;
    }
    d.y_add = f == GMM__FIELD_Y_ADD;
    return gmm__linear_prepare(call, ctx, c->op, "gmm_linear_call", &d, query);
}

/* An engine that does not honour a field declines with a reason, in calls and queries; the next engine serves, and a
   demand is refused. An engine that honours the field serves, and so does one without it if the call leaves the field
   unset. */
static void optional_fields(int arg) {
    gmm_context *ctx = NULL;
    (void)arg;
    T_CHECK(gmm_create(&ctx, NULL, NULL) == GMM_OK, "context");
    for (int i = 0; i < T_COUNT(field_cases); i++)
        for (int query = 0; query < 2; query++) {
            const field_case *c = &field_cases[i];
            const field_case plain = { -1, c->op, "" };
            gmm__engine_row rows[2] = { row_of(GMM_ENGINE_WGMMA, general_plan), row_of(GMM_ENGINE_MMA, general_plan) };
            char says[96];
            gmm__call call;
            gmm__plan plan;
            rows[0].ops[c->op].plan = rows[1].ops[c->op].plan = general_plan;
            snprintf(says, sizeof says, "wgmma does not honour %s", c->name);
            T_CHECK(field_call(ctx, c, GMM_ENGINE_AUTO, query, &call) == GMM_OK, "%s", gmm_last_error(ctx));
            T_CHECK(gmm__select_from(rows, 2, &call, &plan) == GMM_OK && plan.engine == GMM_ENGINE_WGMMA, "%s: \"%s\"",
                    c->name, plan.note);
            honoured[1][c->field] = 0;
            rows[0].honours = honoured[1];
            T_CHECK(gmm__select_from(rows, 2, &call, &plan) == GMM_OK && plan.engine == GMM_ENGINE_MMA &&
                        strstr(plan.note, says), "%s: %s \"%s\"", c->name, gmm_engine_name(plan.engine), plan.note);
            T_CHECK(gmm__select(&call, &plan) == GMM_OK && plan.engine == GMM_ENGINE_CPU, "%s", gmm_last_error(ctx));
            T_CHECK(field_call(ctx, c, GMM_ENGINE_WGMMA, query, &call) == GMM_OK, "%s", gmm_last_error(ctx));
            T_CHECK(gmm__select_from(rows, 2, &call, &plan) == GMM_E_UNSUPPORTED &&
                        strstr(gmm_last_error(ctx), "options.engine") && strstr(gmm_last_error(ctx), says),
                    "%s: \"%s\"", c->name, gmm_last_error(ctx));
            T_CHECK(field_call(ctx, &plain, GMM_ENGINE_AUTO, query, &call) == GMM_OK, "%s", gmm_last_error(ctx));
            T_CHECK(gmm__select_from(rows, 2, &call, &plan) == GMM_OK && plan.engine == GMM_ENGINE_WGMMA, "%s: \"%s\"",
                    c->name, plan.note);
        }
    gmm_destroy(ctx);
}

void tests_select(void) {
    t_add_host(optional_fields, 0, "select declines by the name of the optional field that an engine does not honour");
    t_add_host(open_addresses, 0, "select answers queries without addresses, on engines that need alignment");
}
