/* A checkpoint with one key per expert becomes one with a grouped tensor per linear layer: from Mixtral's names to
   those of Megatron-LM. The source is in memory; gmm_ckpt_run.io reads and writes files instead. */
#include "gmm.h"
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, EXPERTS = 4, H = 4, F = 3, M = F * H, PER_LAYER = EXPERTS * H + EXPERTS * 3 * M, HEAD = 5 * H };

static float values[LAYERS * PER_LAYER + HEAD]; /* value i is i, so that a copy of it says where it was */
static void check(gmm_status status, const gmm_ckpt_report *report) {
    if (status) exit((fprintf(stderr, "%s: %s\n", gmm_status_name(status), report->error.text), 1));
}

/* Adds the matrix at *offset to the table and advances *offset to the next one. */
static void add(gmm_ckpt_table *table, const char *name, int64_t rows, int64_t cols, int64_t *offset) {
    const gmm_ckpt_tensor tensor = {.name = name, .dtype = GMM_F32, .rank = 2, .shape = {rows, cols},
                                    .offset = *offset, .bytes = rows * cols * (int64_t)sizeof(float)};
    gmm_ckpt_report report;
    check(gmm_ckpt_table_add(table, &tensor, &report), &report);
    *offset += tensor.bytes;
}

/* Element i of a target by the source's order: the router, then w1, w2, w3 of each expert. FC1 has w1's rows (gate) and
   then w3's (up). Behind the layers is the tensor that no layer of experts uses. */
static int expected(int slot, int layer, int i) {
    const int base = layer * PER_LAYER, experts = base + EXPERTS * H, expert = i / (2 * M), at = i % (2 * M);
    if (slot == GMM_CKPT_FC1) return experts + expert * 3 * M + (at < M ? at : at + M);
    if (slot == GMM_CKPT_FC2) return experts + i / M * 3 * M + M + i % M;
    return base + i;
}

/* Compares a target with its expected values, and ends the program where one differs. */
static void compare(const gmm_ckpt_plan *plan, const void *memory, const char *name, int slot, int layer, int count) {
    const gmm_ckpt_table *targets = gmm_ckpt_plan_targets(plan);
    const int64_t at = gmm_ckpt_table_find(targets, name);
    const gmm_ckpt_tensor *t = at < 0 ? NULL : gmm_ckpt_table_tensors(targets, NULL) + at;
    int wrong = !t || t->bytes != count * (int64_t)sizeof(float);
    for (int i = 0; !wrong && i < count; i++)
        wrong = ((const float *)memory)[t->offset / 4 + i] != (float)expected(slot, layer, i);
    if (wrong) exit((fprintf(stderr, "%s is wrong\n", name), 1));
    printf("  %s: %d values\n", name, count);
}

int main(void) {
    static const char *const names[] = {"experts.linear_fc1", "experts.linear_fc2", "router"}; /* by slot */
    static const int sizes[] = {EXPERTS * 2 * M, EXPERTS * M, EXPERTS * H};
    gmm_ckpt_report report;
    gmm_ckpt_table *table;
    gmm_ckpt_linear *linears;
    gmm_ckpt_plan *plan;
    int32_t storage; /* 0 for the first storage, as in add */
    int64_t offset = 0, keys_in, keys_out, count = 0, cursor = 0;
    char name[80];
    for (int i = 0; i < LAYERS * PER_LAYER + HEAD; i++) values[i] = (float)i;
    check(gmm_ckpt_table_create(&table, NULL, &report.error), &report);
    check(gmm_ckpt_table_add_storage(table, values, sizeof values, &storage, &report.error), &report);
    for (int l = 0; l < LAYERS; l++) {
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.gate.weight", l);
        add(table, name, EXPERTS, H, &offset);
        for (int i = 0; i < EXPERTS * 3; i++) {
            snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.%d.w%d.weight", l, i / 3, i % 3 + 1);
            add(table, name, i % 3 == 1 ? H : F, i % 3 == 1 ? F : H, &offset);
        }
    }
    add(table, "lm_head.weight", HEAD / H, H, &offset);
    (void)gmm_ckpt_table_tensors(table, &keys_in);

    /* The scheme is the first one in which a scan finds layers of experts. */
    const gmm_ckpt_part part = {.table = table};
    gmm_ckpt_source source = {.struct_size = sizeof source, .part_count = 1, .parts = &part};
    for (int32_t i = 0; !count && (source.scheme = gmm_ckpt_scheme_at(i)); i++)
        if (gmm_ckpt_scan(&source, 0, &linears, &count, NULL, &report)) count = 0;
    if (!count) return (puts("no scheme has these keys"), 1);
    printf("%s: %d keys in, %d linear layers\n", source.scheme->name, (int)keys_in, (int)count);

    /* The target has one tensor of all experts. Keys of no layer of experts stay as they are. */
    const gmm_ckpt_target target = {.struct_size = sizeof target, .scheme = gmm_ckpt_scheme_of("megatron")};
    gmm_ckpt_cost cost = GMM_ZERO;
    source.extra = GMM_CKPT_EXTRA_KEEP;
    for (int64_t i = 0; i < count; i++) linears[i].grouped_weight = 1;
    check(gmm_ckpt_plan_create(&plan, &source, &target, linears, count, NULL, &report), &report);
    check(gmm_ckpt_verify(plan, NULL, 0, &report.error), &report);
    check(gmm_ckpt_cost_of(plan, &cost, &report.error), &report);
    const gmm_ckpt_run run = {.struct_size = sizeof run, .memory = malloc((size_t)cost.target_bytes)};
    if (!run.memory) return 1;
    check(gmm_ckpt_apply(plan, &run, &cursor, &report.error), &report);
    (void)gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), &keys_out);
    printf("%s: %d keys out, %d bytes copied\n", target.scheme->name, (int)keys_out, (int)cost.bytes_written);
    for (int i = 0; i < LAYERS * 3; i++) {
        snprintf(name, sizeof name, "decoder.layers.%d.mlp.%s.weight", i / 3, names[i % 3]);
        compare(plan, run.memory, name, i % 3, i / 3, sizes[i % 3]);
    }
    compare(plan, run.memory, "lm_head.weight", GMM_CKPT_ROUTER, LAYERS, HEAD);
    free(run.memory);
    gmm_ckpt_plan_destroy(plan);
    gmm_ckpt_linears_release(linears, NULL);
    gmm_ckpt_table_destroy(table);
    return keys_in != 27 || keys_out != 7;
}
