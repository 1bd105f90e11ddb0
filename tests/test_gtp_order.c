/* test_gtp_order.c - the order of work in the GTP runtime, on CPU ranks: random schedules, each stream wait left out,
   ranks that stop, and collectives that fail. */
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

/* Runs a case under `seeds` random schedules; all results must be equal. */
static void schedules(gtp_case c, int seeds, gtp_result *out) {
    uint64_t hash = 0;
    for (int i = 0; i < seeds; i++) {
        c.seed = i ? t_rand() | 1 : 0;
        gtp_case_check(&c, out);
        T_CHECK(i == 0 || out->hash == hash, "schedule %d computes something else", i);
        hash = out->hash;
    }
}
#define schedules(...) T_CALL(schedules, __VA_ARGS__)

/* Changes one setting of the plain case; all schedules of both give the same results. */
static void same(const gtp_case *a, const gtp_case *b, gtp_result *out) {
    gtp_result other;
    schedules(*a, 6, &other);
    schedules(*b, 6, out);
    T_CHECK(out->hash == other.hash, "different results");
}
#define same(...) T_CALL(same, __VA_ARGS__)

static void training(int ranks) {
    gtp_result out;
    gtp_case c = plain(ranks);
    schedules(c, 20, &out);
    T_CHECK((ranks == 1) == (out.communications == 0), "%lld collectives", (long long)out.communications);
    if (ranks > 1) return;
    T_CHECK(out.stats[0].gathers == 0 && out.need.gather_bytes == 0, "nothing is gathered");
}

static void depths(int arg) {
    const gtp_case base = plain(2 + 2 * (arg & 1));
    gtp_result out;
    for (int depth = 0; depth <= 3; depth++) {
        gtp_case c = base;
        c.layers = 5 - (arg & 1);
        c.prefetch = depth;
        c.taller = arg & 2 ? 5 : 0;
        {
            gtp_case flat = c;
            flat.prefetch = 0;
            same(&flat, &c, &out);
        }
        T_CHECK((out.stats[0].prefetches > 0) == (depth > 0), "%lld prefetches", (long long)out.stats[0].prefetches);
    }
}

/* Bundles that are gathered together give the results of those that are gathered alone, in fewer group calls. Layers of
   two shapes, a last call that gathers fewer, chains with and without recompute. */
static void together(int arg) {
    const gtp_case base = plain(2 + 2 * (arg & 1));
    for (int depth = 0; depth <= 3; depth++)
        for (int n = 2; n <= 3; n++) {
            gtp_case alone = base, c;
            gtp_result want, got;
            alone.layers = 5;
            alone.prefetch = depth;
            alone.taller = arg & 2 ? 5 : 0;
            alone.recompute = arg & 4 ? 31 : 0;
            c = alone;
            c.together = n;
            schedules(alone, 2, &want);
            schedules(c, 6, &got);
            T_CHECK(got.hash == want.hash, "different results");
            want.groups -= want.stats[0].submits; /* those of gathers */
            got.groups -= got.stats[0].submits;
            T_CHECK(want.groups == want.stats[0].gathers, "%lld groups, %lld gathers", (long long)want.groups,
                    (long long)want.stats[0].gathers);
            T_CHECK(got.groups < got.stats[0].gathers && got.groups <= want.groups * (depth ? 9 : 6) / 10,
                    "%lld groups of %lld gathers, alone %lld", (long long)got.groups, (long long)got.stats[0].gathers,
                    (long long)want.groups);
            if (!(arg & 2)) { /* slots of one size; at most one per layer, and in the recompute chain another */
                const int most = alone.layers * (arg & 4 ? 2 : 1), more = (n - 1) * (arg & 4 ? 2 : 1);
                const int slots = want.need.gather_slots + more;
                T_CHECK(got.need.gather_slots == (slots < most ? slots : most), "%d slots, alone %d",
                        (int)got.need.gather_slots, (int)want.need.gather_slots);
            }
            T_CHECK(got.stats[0].prefetched == got.stats[0].prefetches, "%lld of %lld prefetches were found",
                    (long long)got.stats[0].prefetched, (long long)got.stats[0].prefetches);
            T_CHECK(got.stats[0].exposed <= want.stats[0].exposed, "%lld exposed, alone %lld",
                    (long long)got.stats[0].exposed, (long long)want.stats[0].exposed);
            if (T.verbose)
                printf("        depth %d, %d together: %lld groups of %lld gathers, %lld exposed, %lld busy; alone "
                       "%lld gathers, %lld exposed\n", depth, n, (long long)got.groups, (long long)got.stats[0].gathers,
                       (long long)got.stats[0].exposed, (long long)got.stats[0].busy, (long long)want.stats[0].gathers,
                       (long long)want.stats[0].exposed);
        }
}

static void synchronous(int arg) {
    gtp_case a = plain(4), b;
    gtp_result out;
    a.consumes = arg;
    b = a;
    b.synchronous = 1;
    same(&a, &b, &out);
}

static void sums_alone(int arg) {
    gtp_case c = plain(2);
    gtp_result out;
    (void)arg;
    c.layers = 2;
    schedules(c, 10, &out);
    T_CHECK(out.stats[0].submits == 2 * c.steps * c.micro, "%lld submits", (long long)out.stats[0].submits);
    T_CHECK(out.reported == out.stats[0].submits * c.experts, "%lld reported", (long long)out.reported);
}

static void published(int depth) { /* depth 2: one block ahead as well */
    gtp_case a = plain(4), b;
    gtp_result out;
    a.prefetch = depth;
    a.wrap = 1;
    b = a;
    b.publish_on_need = 1;
    same(&a, &b, &out);
    /* once per bundle and forward; the prefetches at the end of a step were those of the next forward */
    T_CHECK(out.asked == (int64_t)a.steps * a.micro * a.layers * a.experts, "%lld asked", (long long)out.asked);
}

static void recompute(int arg) {
    gtp_case a = plain(2), b;
    gtp_result out;
    (void)arg;
    a.publish_on_need = 1;
    b = a;
    b.recompute = 15;
    same(&a, &b, &out);
    T_CHECK(out.asked == (int64_t)a.steps * a.micro * a.layers * a.experts, "recompute asked, %lld",
            (long long)out.asked);
}

/* Neighbouring layers of different shapes in forward, of one shape in recompute; or a subset of layers */
static void recompute_shapes(int arg) {
    gtp_case a = plain(2 + 2 * (arg & 1)), b;
    gtp_result out;
    a.taller = arg & 2 ? 0 : 10;
    b = a;
    b.recompute = arg & 2 ? 5 : 15;
    b.two_streams = 1 + (arg & 1);
    same(&a, &b, &out);
}

static void two_readers(int ranks) { /* a slot is read on two streams before it is written again */
    gtp_case a = plain(ranks), b;
    gtp_result out;
    b = a;
    b.two_streams = 2;
    same(&a, &b, &out);
    b.layers = a.layers = 5;
    same(&a, &b, &out);
}

static void neighbours(int arg) {
    gtp_case c = plain(2);
    gtp_result out;
    (void)arg;
    c.layers = 2;
    c.experts = 1;
    schedules(c, 40, &out);
}

static void few_slots(int arg) {
    gtp_case c = plain(2);
    gtp_result out;
    c.prefetch = arg;
    schedules(c, 20, &out);
    T_CHECK(out.need.gather_slots == arg + 1, "%d slots", (int)out.need.gather_slots);
    T_CHECK(out.stats[0].busy == 0 && out.stats[0].outdated == 0, "every prefetch finds a slot, and is used");
}

static void consumed(int arg) {
    gtp_case c = plain(2);
    gtp_result out;
    c.consumes = arg;
    schedules(c, 20, &out);
    T_CHECK(out.stats[0].acquires == 2 * (int64_t)arg * c.steps * c.micro * c.layers, "acquires");
    T_CHECK(out.reported == (int64_t)arg * c.steps * c.micro * c.layers * c.experts, "%lld callbacks",
            (long long)out.reported);
}

static void other_order(int arg) {
    gtp_case a = plain(2), b;
    gtp_result out;
    a.prefetch = arg;
    b = a;
    b.shuffled = 1;
    same(&a, &b, &out);
}

/* A gather without acquire is in flight at the fence: its data is then outdated. */
static void unwanted_gather(int arg) {
    gtp_case a = plain(2), b;
    gtp_result out;
    (void)arg;
    b = a;
    b.unused_prefetch = 1;
    same(&a, &b, &out);
    T_CHECK(out.stats[0].outdated > 0, "the stray prefetch is not used");
}

static void wires(int arg) { /* wire dtype and main_grad dtype, each fp32 and bf16 */
    gtp_case a = plain(4), b;
    gtp_result out;
    b = a;
    b.wire = arg & 1 ? GMM_BF16 : GMM_F32;
    b.main_grad = arg & 2 ? GMM_BF16 : GMM_F32;
    same(&a, &b, &out);
    T_CHECK(out.stats[0].reduced_bytes ==
                (arg & 1 ? 2 : 4) * out.stats[0].submits * a.experts * 2 * a.cols * (a.ranks - 1), "bytes on the wire");
}

/* The forecast counts the bytes that ranks receive of each other: gathers, of which those whose weights are still in a
   slot send nothing, and reductions. Every step begins with new weights. */
static void bytes_foreseen(int ranks) {
    for (int k = 0; k < 16; k++) {
        gtp_case c = plain(ranks);
        gmm_shard shards[CASE_LAYERS];
        gmm_gtp_stage stages[CASE_LAYERS];
        gmm_gtp_forecast f = GMM_ZERO;
        gtp_result out;
        gmm_error e = GMM_ZERO;
        int64_t gathered, reduced;
        c.layers = k & 1 ? 4 : 6;
        c.prefetch = k / 2 % 4;
        c.wire = k & 8 ? GMM_BF16 : GMM_F32;
        if (c.prefetch == 1) { /* a slot for each of two shapes, as for FC1 and FC2 */
            c.taller = 0xAA;
            c.prefetch = 0;
            c.rows = 20;
            c.cols = 48;
        }
        gtp_case_check(&c, &out);
        memset(shards, 0, sizeof shards);
        memset(stages, 0, sizeof stages);
        for (int l = 0; l < c.layers; l++) {
            shards[l].dtype = GMM_BF16;
            shards[l].rows = c.taller >> l & 1 ? 4 * c.rows : c.rows;
            shards[l].cols = c.cols;
            shards[l].gtp_size = ranks;
            shards[l].unit = 2;
            stages[l].shard = &shards[l];
            stages[l].bundle = c.experts;
        }
        f.stages = c.layers;
        f.gemm_rate = f.link_rate = 1;
        f.prefetch = c.taller ? 1 : c.prefetch;
        f.wire = c.wire;
        T_OK_TEXT(gmm_gtp_foresee(&f, stages, &e), e.text);
        gathered = c.steps * f.gathered_bytes;
        reduced = c.steps * c.micro * f.reduced_bytes;
        f.wrap = 1; /* micro-batches behind the first find what the backward before them has left in the slots */
        T_OK_TEXT(gmm_gtp_foresee(&f, stages, &e), e.text);
        gathered += c.steps * (c.micro - 1) * f.gathered_bytes;
        T_CHECK(gathered > 0 && reduced > 0, "nothing is sent");
        for (int r = 0; r < ranks; r++)
            T_CHECK(out.stats[r].gathered_bytes == gathered && out.stats[r].reduced_bytes == reduced,
                    "rank %d, case %d: gathered %lld, foreseen %lld; reduced %lld, foreseen %lld", r, k,
                    (long long)out.stats[r].gathered_bytes, (long long)gathered,
                    (long long)out.stats[r].reduced_bytes, (long long)reduced);
    }
}

/* AUTO exchanges parts where the communicator says that this is faster, and else sums of BF16 over more than two ranks,
   which a reduce_scatter would round at every rank. Every algorithm takes one group call per bundle. */
static void reductions(int arg) {
    gtp_case a = plain(arg), b;
    gtp_result out;
    for (int i = 0; i < 4; i++) {
        gtp_case c = plain(arg);
        int64_t want;
        c.wire = i & 1 ? GMM_BF16 : GMM_F32;
        c.exchanges = i >> 1;
        gtp_case_check(&c, &out);
        want = c.exchanges || (arg > 2 && c.wire == GMM_BF16) ? out.stats[0].submits * c.experts : 0;
        T_CHECK(out.exchanges == want, "%s, exchanges %d: %lld calls of all_to_all, not %lld", gmm_dtype_name(c.wire),
                c.exchanges, (long long)out.exchanges, (long long)want);
    }
    a.wire = GMM_BF16;
    b = a;
    b.reduction = arg == 2 ? GMM_GTP_REDUCE_SCATTER : GMM_GTP_REDUCE_EXCHANGE;
    same(&a, &b, &out);
    T_CHECK(out.groups == out.stats[0].gathers + out.stats[0].submits, "%lld groups", (long long)out.groups);
    {
        const size_t taken = out.need.reduce_bytes;
        gtp_case_check(&a, &out);
        T_CHECK(out.need.reduce_bytes == taken, "AUTO takes another algorithm");
        a.wire = GMM_F32;
        b = a;
        b.reduction = GMM_GTP_REDUCE_SCATTER;
        same(&a, &b, &out);
        b.reduction = GMM_GTP_REDUCE_EXCHANGE;
        same(&a, &b, &out);
    }
}

static void ids(int arg) {
    gtp_case a = plain(4), b;
    gtp_result out;
    b = a;
    if (arg) b.other_ids = 1;
    else b.permuted = 1;
    schedules(a, 6, &out);
    schedules(b, 20, &out);
}

static void delayed(int arg) {
    gtp_case a = plain(2), b;
    gtp_result out;
    (void)arg;
    a.wgrad_slots = 4;
    b = a;
    b.delayed = 1;
    same(&a, &b, &out);
    b.wgrad_slots = 2; /* too few slots for four open gradients: an error, nothing is overwritten */
    b.seed = 5;
    gtp_case_run(&b, &out);
    T_CHECK(out.status[0] == GMM_E_STATE && strstr(out.text[0], "wgrad_slots"), "%s", out.text[0]);
    T_CHECK(out.races == 0, "%s", out.race);
}

static void frozen(int bits) { /* a frozen head, a frozen predecessor, both */
    gtp_case a = plain(2);
    gtp_result out;
    a.frozen = (unsigned)bits;
    schedules(a, 20, &out);
    a.wrap = 1;
    a.prefetch = 2;
    schedules(a, 20, &out);
}

static void zero_tokens(int rank) {
    gtp_case a = plain(4);
    gtp_result out;
    a.zero_rank = rank;
    schedules(a, 20, &out);
}

static void turnaround(int arg) { /* chain heads and tails whose weights are still in a slot */
    gtp_case c = plain(2);
    gtp_result out;
    int64_t exposed;
    (void)arg;
    c.steps = 1;
    c.micro = 3;
    gtp_case_check(&c, &out);
    exposed = out.stats[0].exposed;
    T_CHECK(exposed == 1, "%lld exposed: the very first alone, since heads are still there", (long long)exposed);
    T_CHECK(out.stats[0].resident >= c.micro, "the tail of forward is the head of backward");
    c.layers = 5; /* an odd number of layers over two slots: the head of the next forward has to be gathered */
    c.wrap = 1;
    gtp_case_check(&c, &out);
    T_CHECK(out.stats[0].exposed == 1, "%lld exposed", (long long)out.stats[0].exposed);
}

/* The main_grad of every expert of the bundle, read on the callback's stream, includes the sum of this
   submit under every schedule; gtp_case_check compares it. */
static void callbacks(int experts) {
    gtp_case c = plain(2);
    gtp_result out;
    c.experts = experts;
    c.consumes = 2;
    c.micro = 3;
    schedules(c, 20, &out);
    T_CHECK(out.reported == (int64_t)c.steps * c.micro * c.consumes * c.layers * experts, "%lld reported",
            (long long)out.reported);
}

static void caller_gradients(int arg) {
    gtp_case a = plain(2), b;
    gtp_result out;
    (void)arg;
    b = a;
    b.caller_gradients = 1;
    b.two_streams = 1;
    same(&a, &b, &out);
}

/* Random settings of every field. */
static void random_schedules(int arg) {
    gtp_result out;
    (void)arg;
    for (int i = 0; i < 500; i++) {
        static const int layers[] = {1, 2, 4, 5};
        gtp_case c = plain((int)t_int(1, 3));
        c.layers = layers[t_int(0, 3)];
        c.experts = (int)t_int(1, 2);
        c.rows = (int)t_int(1, 7);
        c.cols = (int)t_int(1, 3);
        c.prefetch = (int)t_int(0, 3);
        c.held = (int)t_int(0, 2);
        c.steps = (int)t_int(1, 3);
        c.micro = (int)t_int(1, 2);
        c.consumes = t_int(0, 4) ? 1 : 3;
        c.recompute = t_int(0, 2) ? 0 : (unsigned)t_int(0, 31);
        c.frozen = t_int(0, 3) ? 0 : (unsigned)t_int(0, 31);
        c.taller = t_int(0, 1) ? 0 : (unsigned)t_int(0, 31);
        c.zero_rank = t_int(0, 4) ? 0 : (int)t_int(1, c.ranks);
        c.delayed = c.consumes == 1 && t_int(0, 3) == 0;
        c.wgrad_slots = c.delayed ? c.layers : (int)t_int(1, 3);
        c.shuffled = t_int(0, 3) == 0;
        c.unchained = t_int(0, 5) == 0;
        c.wrap = !c.unchained && t_int(0, 1);
        c.publish_on_need = (int)t_int(0, 1);
        c.unused_prefetch = t_int(0, 3) == 0;
        c.two_streams = (int)t_int(0, 2);
        c.caller_gradients = t_int(0, 3) == 0;
        c.permuted = (int)t_int(0, 1);
        c.other_ids = (int)t_int(0, 1);
        c.wire = t_int(0, 1) ? GMM_F32 : GMM_BF16;
        c.main_grad = t_int(0, 1) ? GMM_F32 : GMM_BF16;
        c.reduction = (gmm_gtp_reduction)t_int(0, 2);
        c.synchronous = t_int(0, 5) == 0;
        c.seed = t_rand();
        gtp_case_check(&c, &out);
    }
}

/* One thread per rank; compute runs on the threads themselves (stream NULL). */
static void threads(int arg) {
    gtp_case a = plain(arg & 15), b;
    gtp_result one, out;
    gtp_case_check(&a, &one);
    b = a;
    b.threads = 1;
    b.timeout_ms = 20000;
    b.prefetch = 2;
    for (int i = 0; i < 6; i++) {
        b.seed = i ? t_rand() : 0;
        gtp_case_check(&b, &out);
        T_CHECK(out.hash == one.hash, "threads compute something else");
    }
}

/* Every stream wait of rank 0 is left out in turn: the race checker reports it under every schedule, unless earlier
   waits imply it. */
static void mutation(int arg) {
    gtp_case c = plain(2);
    gtp_result whole, out;
    int64_t needed = 0;
    c.unused_prefetch = 1;
    c.steps = 2;
    c.layers = 3;
    c.two_streams = arg & 1;
    c.prefetch = arg & 2 ? 2 : 1;
    c.recompute = arg & 4 ? 5 : 0;
    c.unchained = arg == 8;
    c.together = arg == 9 ? 2 : 0;
    gtp_case_check(&c, &whole);
    T_CHECK(whole.waits < TRACE_WAITS, "%lld waits", (long long)whole.waits);
    for (c.drop_wait = 1; c.drop_wait <= whole.waits; c.drop_wait++) {
        int64_t fired = 0;
        needed += !whole.implied[c.drop_wait];
        for (c.seed = 1; c.seed <= 3; c.seed++) {
            gtp_case_run(&c, &out);
            fired += out.races > 0;
        }
        T_CHECK(fired == (whole.implied[c.drop_wait] ? 0 : 3), "wait %d of %lld: %lld of 3 schedules show it, implied "
                "%d", c.drop_wait, (long long)whole.waits, (long long)fired, whole.implied[c.drop_wait]);
    }
    T_CHECK(needed > whole.waits / 2, "%lld of %lld waits are needed", (long long)needed, (long long)whole.waits);
    if (T.verbose) printf("%lld waits, %lld of them needed\n", (long long)whole.waits, (long long)needed);
}

/* Checks that the error text of a hung or failed collective names the operation, the bundle and the peer. */
static void names(const char *text, const char *peer) {
    T_CHECK(strstr(text, "'layer'") && strstr(text, peer), "no '%s': %s", peer, text);
    T_CHECK(strstr(text, "all_gather") || strstr(text, "reduce_scatter") || strstr(text, "all_to_all"), "%s", text);
}
#define names(...) T_CALL(names, __VA_ARGS__)

/* A rank stops: the others report the collective and the rank before the timeout ends; also with one thread per rank.
   After that nothing that was enqueued touches their memory (gtp_case_run compares it). */
static void stopped_rank(int arg) {
    gtp_case c = plain(4);
    gtp_result out;
    int named = 0;
    c.threads = arg;
    c.timeout_ms = arg ? 2000 : 150; /* a thread that has no processor for that long would be named instead */
    for (c.silent_rank = 1; c.silent_rank <= 4; c.silent_rank++) {
        double spent = -gtp_seconds();
        gtp_case_run(&c, &out);
        spent += gtp_seconds();
        T_CHECK(out.races == 0 && out.wrong == 0, "%s %s", out.race, out.first_wrong);
        T_CHECK(spent < 10 + 1e-3 * c.timeout_ms, "%g seconds with a limit of %d ms", spent, c.timeout_ms);
        for (int i = 0; i < 4 && arg; i++) {
            char peer[40];
            if (i == c.silent_rank - 1) continue;
            snprintf(peer, sizeof peer, "rank %d of 4", c.silent_rank - 1);
            T_CHECK(out.status[i] == GMM_E_COMM, "rank %d: %s", i, gmm_status_name(out.status[i]));
            names(out.text[i], peer);
            named++;
        }
        T_CHECK(arg || out.run == GMM_E_STATE, "%s", gmm_status_name(out.run));
    }
    T_CHECK(named == (arg ? 12 : 0), "%d", named);
}

/* Every collective call fails in turn: that rank's object is unusable, the others get the error, and no memory is
   touched out of order or after the error. */
static void failed_call(int arg) {
    gtp_case c = plain(2);
    gtp_result whole, out;
    int named = 0;
    c.steps = 2;
    c.threads = arg & 1;
    c.timeout_ms = 5000;
    c.reduction = arg & 2 ? GMM_GTP_REDUCE_EXCHANGE : GMM_GTP_REDUCE_SCATTER;
    gtp_case_check(&c, &whole);
    for (c.fail_call = 1; c.fail_call <= whole.communications; c.fail_call += arg ? 7 : 1) {
        c.seed = (uint64_t)c.fail_call;
        gtp_case_run(&c, &out);
        T_CHECK(out.status[0] == GMM_E_COMM, "call %d: %s", c.fail_call, out.text[0]);
        names(out.text[0], "by rank 0 of 2");
        T_CHECK(out.status[1] == GMM_E_COMM || out.run == GMM_E_COMM, "the other rank gets no error: %s",
                gmm_status_name(out.status[1]));
        if (out.status[1]) names(out.text[1], "by rank 0 of 2");
        named += out.status[1] != GMM_OK;
        T_CHECK(out.races == 0 && out.wrong == 0, "%s %s", out.race, out.first_wrong);
    }
    T_CHECK(named > 0, "the other rank was through each time");
}

void tests_gtp_order(void) {
    static const char *const variants[] = {"", "two streams", "depth 2", "depth 2, two streams", "recompute",
        "recompute, two streams", "recompute, depth 2", "all", "no chains", "two gathered together"};
    static const int sizes[] = {1, 2, 4, 8};
    for (int i = 0; i < (int)T_COUNT(sizes); i++)
        t_add_host(training, sizes[i], "gtp order training g=%d", sizes[i]);
    for (int i = 0; i < 4; i++)
        t_add_host(depths, i, "gtp order depths 0 to 3, g=%d%s", 2 + 2 * (i & 1), i & 2 ? ", two shapes" : "");
    for (int i = 0; i < 8; i++)
        t_add_host(together, i, "gtp order gathered together g=%d%s%s", 2 + 2 * (i & 1), i & 2 ? ", two shapes" : "",
                   i & 4 ? ", recompute" : "");
    for (int i = 1; i <= 3; i += 2) t_add_host(synchronous, i, "gtp order synchronous, consumed %d times", i);
    t_add_host(sums_alone, 0, "gtp order two layers, their sums alone");
    t_add_host(published, 1, "gtp order shards published by the callback");
    t_add_host(published, 2, "gtp order shards published by the callback, further ahead");
    t_add_host(recompute, 0, "gtp order recompute asks nobody");
    for (int i = 0; i < 2; i++)
        t_add_host(recompute_shapes, i, "gtp order recompute chain of other shapes, g=%d", 2 + 2 * i);
    for (int i = 2; i < 4; i++)
        t_add_host(recompute_shapes, i, "gtp order recompute of a subset, g=%d", 2 + 2 * (i & 1));
    for (int i = 1; i <= 4; i *= 2) t_add_host(two_readers, i, "gtp order one slot, two readers, g=%d", i);
    t_add_host(neighbours, 0, "gtp order two equal neighbours");
    for (int i = 1; i <= 2; i++) t_add_host(few_slots, i, "gtp order %d slots for four bundles", i + 1);
    t_add_host(consumed, 3, "gtp order consumed three times");
    for (int i = 0; i <= 2; i++) t_add_host(other_order, i, "gtp order backward in another order, depth %d", i);
    for (int i = 1; i <= 4; i += 3) t_add_host(callbacks, i, "gtp order callbacks behind the sums, %d experts", i);
    t_add_host(unwanted_gather, 0, "gtp order a fence over a gather that nobody wants");
    for (int i = 0; i < 4; i++)
        t_add_host(wires, i, "gtp order wire %s, main_grad %s", i & 1 ? "bf16" : "f32", i & 2 ? "bf16" : "f32");
    for (int i = 2; i <= 16; i += i < 4 ? 1 : i) t_add_host(bytes_foreseen, i, "gtp order bytes as foreseen, g=%d", i);
    for (int i = 2; i <= 8; i *= 2) t_add_host(reductions, i, "gtp order reduction algorithms, g=%d", i);
    t_add_host(ids, 0, "gtp order ranks in another order");
    t_add_host(ids, 1, "gtp order ids differ from rank to rank");
    t_add_host(delayed, 0, "gtp order delayed gradients");
    for (int i = 1; i <= 3; i++) t_add_host(frozen, i, "gtp order frozen layers 0x%x", i);
    t_add_host(frozen, 15, "gtp order all layers frozen");
    for (int i = 1; i <= 4; i += 3) t_add_host(zero_tokens, i, "gtp order rank %d without tokens", i - 1);
    t_add_host(turnaround, 0, "gtp order turnaround, head and tail");
    t_add_host(caller_gradients, 0, "gtp order gradients from other memory");
    for (int i = 0; i < 20; i++) t_add_host(random_schedules, i, "gtp order 500 random schedules, %d", i);
    for (int i = 0; i < (int)T_COUNT(sizes); i++) t_add_host(threads, sizes[i], "gtp order threads g=%d", sizes[i]);
    for (int i = 0; i < (int)T_COUNT(variants); i++)
        t_add_host(mutation, i, "gtp order each wait left out%s%s", *variants[i] ? ", " : "", variants[i]);
    t_add_host(stopped_rank, 0, "gtp order a rank stops");
    t_add_host(stopped_rank, 1, "gtp order a rank stops, threads");
    for (int i = 0; i < 4; i++)
        t_add_host(failed_call, i, "gtp order each collective fails%s%s", i & 2 ? ", exchange" : "",
                   i & 1 ? ", threads" : "");
}
