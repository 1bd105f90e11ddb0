/* target.h - fuzz targets: the reader of safetensors headers, and plans of checkpoints. Each function accepts any bytes
   and returns 1 if the library accepted them; a violated invariant calls abort. tests/fuzz/fuzz.c passes libFuzzer's
   inputs; the tests replay the corpus in tests/fuzz/header and tests/fuzz/plan. */
#ifndef GMM_TESTS_FUZZ_TARGET_H
#define GMM_TESTS_FUZZ_TARGET_H

#include "gmm.h"

#include "../../examples/common/safetensors.h"

#include <stdlib.h>
#include <string.h>

/* Input: 2 bytes with the size of the data section, then the header. An accepted header must keep the format's
   rules. */
static inline int fuzz_header(const uint8_t *data, size_t size) {
    st_file file;
    st_error error;
    int64_t at = 0, bytes;
    void *copy;
    if (size < 2) return 0;
    bytes = data[0] | data[1] << 8;
    copy = malloc(size - 1); /* an allocation of exactly this size, so that sanitizers see reads beyond it */
    if (!copy) abort();
    memcpy(copy, data + 2, size - 2);
    error.text[0] = 0;
    if (!st_open_header(&file, copy, (int64_t)size - 2, bytes, &error)) {
        if (!error.text[0]) abort();
        free(copy);
        return 0;
    }
    free(copy);
    for (int64_t i = 0; i < file.count; i++) {
        const st_tensor *t = &file.tensors[i];
        if (t->begin != at || t->bytes < 0 || !st_find(&file, t->name)) abort();
        at += t->bytes;
    }
    if (at != bytes) abort();
    st_close(&file);
    return 1;
}

/* Input: 8 bytes of settings, then tensors: dtype, rank, extents, and a name up to the end of the line. Plans that are
   created must verify, and apply within bounds. */
static inline int fuzz_plan(const uint8_t *data, size_t size) {
    static const char *const states[2] = {"", "m."};
    static const char *const wrappers[1] = {"module"};
    gmm_ckpt_table *table = NULL;
    gmm_ckpt_plan *plan = NULL;
    gmm_ckpt_linear *linears = NULL;
    gmm_ckpt_source source = GMM_ZERO;
    gmm_ckpt_target target = GMM_ZERO;
    gmm_ckpt_part part = GMM_ZERO;
    gmm_ckpt_report report;
    void *blocks[64];
    int64_t count = 0, n = 0;
    const uint8_t *end = data + size, *s = data;
    int accepted = 0;
    if (size < 8 || gmm_ckpt_table_create(&table, NULL, NULL)) return 0;
    data += 8;
    while (data + 2 < end && n < 64) {
        gmm_ckpt_tensor t = GMM_ZERO;
        char name[200];
        size_t length = 0;
        int64_t bits;
        t.dtype = (gmm_dtype)(data[0] % 11);
        t.rank = data[1] % 5;
        data += 2;
        bits = gmm_dtype_bits(t.dtype);
        for (int32_t d = 0; d < t.rank && data < end; d++) bits *= t.shape[d] = *data++ % 80;
        while (data < end && *data != '\n') {
            if (length + 1 < sizeof name && *data) name[length++] = (char)*data;
            data++;
        }
        data++;
        name[length] = 0;
        t.name = name;
        t.bytes = bits / 8;
        if (t.bytes > 1 << 20) break;
        blocks[n] = calloc(1, (size_t)t.bytes + 1);
        if (!blocks[n]) abort();
        if (gmm_ckpt_table_add_storage(table, blocks[n++], t.bytes, &t.storage, NULL)) abort();
        (void)gmm_ckpt_table_add(table, &t, &report);
    }
    part.table = table;
    source.parts = &part;
    source.part_count = 1;
    source.scheme = gmm_ckpt_scheme_at(s[0] % 11);
    source.states = states;
    source.state_count = s[2] & 1 ? 2 : 0;
    source.wrappers = wrappers;
    source.wrapper_count = s[2] >> 1 & 1;
    source.stated.known = s[2] >> 2 & 1;
    source.stated.block = s[3] % 8;
    source.extra = (gmm_ckpt_extra)(s[2] >> 3 & 1);
    source.skip_missing = s[2] >> 4 & 1;
    source.prefer_target = s[2] >> 5 & 1;
    source.drop_extra_state = s[2] >> 6 & 1;
    target.scheme = gmm_ckpt_scheme_at(s[1] % 11);
    target.views = s[2] >> 7;
    target.glu_block = s[4] % 8;
    target.drop_wrappers = s[4] >> 4 & 1;
    if (s[4] >> 5 & 1) source.prefix = "module.";
    target.rank.ep_size = 1 + s[5] % 4;
    target.rank.ep_rank = s[5] / 4 % target.rank.ep_size;
    target.rank.etp_size = 1 + s[6] % 4;
    target.rank.etp_rank = s[6] / 4 % target.rank.etp_size;
    target.dtype = (gmm_dtype)(s[7] % 4);
    source.equal_scales = s[6] >> 6 & 1;
    if (source.scheme == gmm_ckpt_scheme_at(0)) { /* a scheme that takes the linears' paths */
        gmm_ckpt_linear l[2] = {GMM_ZERO, GMM_ZERO};
        gmm_ckpt_cut cuts[2] = {GMM_ZERO, GMM_ZERO};
        l[0].path = "a.fc";
        l[1].path = "fc";
        for (int i = 0; i < 2; i++) {
            l[i].experts = 1 + s[7] / 4 % 4;
            l[i].out = 4;
            l[i].in = s[7] / 16 % 4 * (s[5] & 64 ? 16 : 1);
            l[i].bias = s[3] & 1;
            l[i].gated = s[3] >> 1 & 1;
            l[i].grouped_weight = s[4] & 1;
            l[i].grouped_bias = s[4] >> 1 & 1;
        }
        cuts[0].row0 = cuts[1].row0 = s[3] >> 4;
        cuts[0].rows = cuts[1].rows = cuts[0].stored_rows = cuts[1].stored_rows = 2;
        if (s[5] & 128) target.cuts = cuts;
        if (s[1] & 16) (void)gmm_ckpt_normalize_map(&plan, table, l, 2, (gmm_ckpt_parity)(s[1] >> 5 & 1), NULL,
                                                    &report);
        else if (s[1] & 64)
            (void)gmm_ckpt_normalize_hook(&plan, table, "fc.", l, (gmm_ckpt_parity)(s[1] >> 5 & 1), NULL, &report);
        else (void)gmm_ckpt_plan_create(&plan, &source, &target, l, 2, NULL, &report);
    } else if (gmm_ckpt_scan(&source, s[7] / 4 % 8, &linears, &count, NULL, &report) == GMM_OK) {
        (void)gmm_ckpt_plan_create(&plan, &source, &target, linears, count, NULL, &report);
    }
    if (!plan && (report.error.status == GMM_OK || !report.error.text[0])) abort();
    if (plan) {
        gmm_ckpt_cost cost = GMM_ZERO;
        gmm_ckpt_run run = GMM_ZERO;
        int64_t cursor = 0;
        accepted = 1;
        if (gmm_ckpt_verify(plan, NULL, 0, &report.error) || gmm_ckpt_cost_of(plan, &cost, NULL)) abort();
        if (cost.target_bytes < 1 << 22) {
            run.memory = malloc((size_t)cost.target_bytes + 1);
            if (!run.memory || gmm_ckpt_apply(plan, &run, &cursor, &report.error)) abort();
            free(run.memory);
        }
    }
    gmm_ckpt_plan_destroy(plan);
    gmm_ckpt_linears_release(linears, NULL);
    gmm_ckpt_table_destroy(table);
    while (n > 0) free(blocks[--n]);
    return accepted;
}

#endif
