/* test_gtp_order.c - the order of work in the GTP runtime, on CPU ranks: every schedule, every wait */
#include "gtp_case.h"

#include <stdio.h>
#include <string.h>

static gtp_case plain(int ranks) {
    gtp_case c;
    memset(&c, 0, sizeof c);
    c.ranks = ranks;
    c.layers = 4;
    c.experts = 2;
    c.rows = 6;
    c.cols = 3;
    c.prefetch = 1;
    c.steps = 3;
    c.micro = 2;
    c.seed = 1;
    c.timeout_ms = 200;
    return c;
}

static void training(int ranks) {
    gtp_result out;
    for (uint64_t seed = 0; seed < 20; seed++) {
        gtp_case c = plain(ranks);
        c.seed = seed;
        gtp_case_check(&c, &out);
    }
}

/* Every wait of rank 0 is left out in turn: the checker notices, whatever the schedule, unless the waits before it say
   the same already. */
static void mutation(int arg) {
    gtp_case c = plain(2);
    gtp_result whole, out;
    int64_t needed = 0;
    c.stray = 1;
    c.steps = 2;
    c.layers = 3;
    c.two_streams = arg & 1;
    c.prefetch = arg & 2 ? 2 : 1;
    c.recompute = arg & 4 ? 5 : 0;
    c.unchained = arg == 8;
    gtp_case_check(&c, &whole);
    T_CHECK(whole.waits < CASE_WAITS, "%lld waits", (long long)whole.waits);
    for (c.drop_wait = 1; c.drop_wait <= whole.waits; c.drop_wait++) {
        int64_t fired = 0;
        needed += !whole.implied[c.drop_wait];
        for (c.seed = 1; c.seed <= 3; c.seed++) {
            gtp_case_run(&c, &out);
            fired += out.races > 0;
        }
        T_CHECK(fired == (whole.implied[c.drop_wait] ? 0 : 3), "wait %d of %lld: %lld of 3 schedules show it, implied %d",
                c.drop_wait, (long long)whole.waits, (long long)fired, whole.implied[c.drop_wait]);
    }
    T_CHECK(needed > whole.waits / 2, "%lld of %lld waits are needed", (long long)needed, (long long)whole.waits);
    if (T.verbose) printf("%lld waits, %lld of them needed\n", (long long)whole.waits, (long long)needed);
}

void tests_gtp_order(void) {
    static const char *const variants[] = {"", "two streams", "depth 2", "depth 2, two streams", "recompute",
        "recompute, two streams", "recompute, depth 2", "all", "no chains"};
    for (int i = 0; i < (int)T_COUNT(variants); i++) t_add_host(mutation, i, "row44 each wait left out %s", variants[i]);

    static const int sizes[] = {1, 2, 4, 8};
    for (int i = 0; i < (int)T_COUNT(sizes); i++) t_add_host(training, sizes[i], "row31 training g=%d", sizes[i]);
}
