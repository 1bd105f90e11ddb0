/* test_allocations.c - each allocation of a program fails once: the call that needs it says so, nothing leaks, and the
   objects that were made before can be used and destroyed.

   malloc, calloc, realloc and free of the whole test program go through the functions below (the linker's --wrap), so
   that also code without an allocator parameter is reached: the readers and writers of files in examples/common. */
#define _GNU_SOURCE /* mkdtemp */
#include "test.h"

#include "checkpoint_keys.h"
#include "files.h"
#include "gmm_gtp.h"
#include "safetensors.h"

#ifdef HAVE_CJSON
#include <cjson/cJSON.h>
#endif
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ----------------------------------------------------------------------------------------------------- Counting --- */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void __wrap_free(void *memory);

/* Of the thread whose allocations are counted. Memory of the C library's own, such as realpath's, is not: it may be
   freed without being known here. */
enum { MOST_LIVE = 4096 };
static _Thread_local struct {
    int on;
    long number, fail, last; /* allocations so far; the first that fails, and the last */
    long refused, live;
    const void *known[MOST_LIVE];
    char wrong[768]; /* a call that failed in another way than for lack of memory; "": none did */
} C;

static int refuse(void) {
    const long n = C.number++;
    if (n < C.fail || n > C.last) return 0;
    C.refused++;
    return 1;
}
static void *note(void *memory) {
    if (memory && C.live < MOST_LIVE) C.known[C.live++] = memory;
    return memory;
}
static void forget(const void *memory) {
    for (long i = C.live; i-- > 0;)
        if (C.known[i] == memory) {
            C.known[i] = C.known[--C.live];
            return;
        }
}

void *__wrap_malloc(size_t bytes) {
    if (!C.on) return __real_malloc(bytes);
    return refuse() ? NULL : note(__real_malloc(bytes));
}
void *__wrap_calloc(size_t count, size_t bytes) {
    if (!C.on) return __real_calloc(count, bytes);
    return refuse() ? NULL : note(__real_calloc(count, bytes));
}
void *__wrap_realloc(void *memory, size_t bytes) {
    void *grown;
    if (!C.on) return __real_realloc(memory, bytes);
    if (refuse()) return NULL;
    if (memory) forget(memory); /* before another thread could get the same address */
    grown = __real_realloc(memory, bytes);
    return note(grown ? grown : memory) ? grown : NULL;
}
void __wrap_free(void *memory) {
    if (C.on && memory) forget(memory);
    __real_free(memory);
}

static int descriptors(void) {
    DIR *open = opendir("/proc/self/fd");
    int n = 0;
    while (open && readdir(open)) n++;
    if (open) closedir(open);
    return n;
}

/* A program of calls: 1 if all succeeded; 0 if one failed, with its message. It releases what it has made. */
typedef struct program { int (*run)(char text[768]); const char *name; int least; } program;

/* Runs it with allocation `fail` refused, and those behind it too if `onwards`. Returns 1 when it no longer has so
   many. */
static int attempt(const program *p, long fail, int onwards) {
    char text[768] = "";
    const int before = descriptors();
    int done;
    long refused, live;
    memset(&C, 0, sizeof C);
    C.fail = fail;
    C.last = onwards ? 1000000 : fail;
    C.on = 1;
    done = p->run(text);
    C.on = 0;
    refused = C.refused;
    live = C.live;
    T_CHECK(live == 0, "%s: %ld blocks leak after allocation %ld failed: %s", p->name, live, fail, text);
    T_CHECK(!C.wrong[0], "%s: allocation %ld failed: %s", p->name, fail, C.wrong);
    T_CHECK(descriptors() == before, "%s: a file stays open after allocation %ld failed", p->name, fail);
    if (!refused) {
        T_CHECK(done, "%s: fails without a refused allocation: %s", p->name, text);
        return 1;
    }
    T_CHECK(!done && text[0], "%s: allocation %ld failed, and no call said so: \"%s\"", p->name, fail, text);
    return 0;
}

static void fails_each(const program *p) {
    for (int onwards = 0; onwards < 2; onwards++) {
        long fail = 0;
        while (!attempt(p, fail, onwards)) fail++;
        T_CHECK(fail >= p->least, "%s: only %ld allocations", p->name, fail);
        if (T.verbose && !onwards) printf("%s: %ld allocations\n", p->name, fail);
    }
}

/* ------------------------------------------------------------------------------------------------------ Library --- */

/* Keeps the message of the first failed call; a status that is none of a lack of memory fails the case. */
static int failed(gmm_status status, const char *message, char text[768]) {
    if (status == GMM_OK) return 0;
    if (!text[0]) snprintf(text, 768, "%s", message);
    if (!C.wrong[0] && (status != GMM_E_MEMORY || !message[0]))
        snprintf(C.wrong, sizeof C.wrong, "%s without GMM_E_MEMORY: %s", gmm_status_name(status), message);
    return 1;
}

static int context_program(char text[768]) {
    gmm_context *ctx = NULL;
    gmm_runtime rt = GMM_ZERO;
    gmm_event event = NULL;
    gmm_error e = GMM_ZERO;
    int bad = failed(gmm_create(&ctx, NULL, &e), e.text, text);
    if (bad) return ctx ? abort(), 0 : 0;
    bad = failed(gmm_runtime_of(ctx, &rt), gmm_last_error(ctx), text) ||
          failed(rt.event_create(rt.self, &event), gmm_last_error(ctx), text) ||
          failed(rt.event_record(rt.self, event, NULL, 0), gmm_last_error(ctx), text);
    if (event) (void)rt.event_destroy(rt.self, event);
    gmm_destroy(ctx);
    return !bad;
}

static gmm_status fill_ones(const void *argument, gmm_stream stream) {
    float *const *to = (float *const *)argument;
    (void)stream;
    for (int i = 0; i < 4; i++) (*to)[i] = 1.0f;
    return GMM_OK;
}

enum { RANKS = 2 };
typedef struct ranks_run {
    gmm_ranks *ranks;
    gmm_runtime rt[RANKS];
    gmm_comm comm[RANKS];
    gmm_stream stream[RANKS][2];
    gmm_event event[RANKS];
    gmm_ranks_graph *graph[RANKS];
    float values[RANKS][4], gathered[RANKS][8];
} ranks_run;

/* Whether the call failed for lack of memory; another status is one too many. */
static int ranks_failed(ranks_run *r, int rank, gmm_status status, char text[768]) {
    return failed(status, r->ranks ? gmm_ranks_error(r->ranks, rank) : "", text);
}

/* What one rank enqueues: work, an event from one stream to the other, copies, fills and collectives. */
static int ranks_enqueue(ranks_run *r, int i, char text[768]) {
    const gmm_runtime *rt = &r->rt[i];
    float *const to = r->values[i];
    gmm_work work = GMM_ZERO;
    gmm_range range = GMM_ZERO;
    range.data = to;
    range.bytes = sizeof r->values[i];
    range.writes = 1;
    work.name = "ones";
    work.function = fill_ones;
    work.argument = &to;
    work.argument_bytes = sizeof to;
    work.ranges = &range;
    work.range_count = 1;
    return ranks_failed(r, i, rt->fill(rt->self, r->gathered[i], 0, sizeof r->gathered[i], r->stream[i][0]), text) ||
           ranks_failed(r, i, rt->run(rt->self, &work, r->stream[i][0]), text) ||
           ranks_failed(r, i, rt->event_record(rt->self, r->event[i], r->stream[i][0], 0), text) ||
           ranks_failed(r, i, rt->stream_wait(rt->self, r->stream[i][1], r->event[i], 0), text) ||
           ranks_failed(r, i, rt->copy(rt->self, r->gathered[i], to, 4, r->stream[i][1]), text) ||
           ranks_failed(r, i, r->comm[i].all_gather(r->comm[i].self, to, r->gathered[i], sizeof r->values[i],
                                                    r->stream[i][1]), text) ||
           ranks_failed(r, i, r->comm[i].all_reduce_max(r->comm[i].self, to, 4, r->stream[i][1]), text);
}

/* The same captured as a graph, and launched. */
static int ranks_capture(ranks_run *r, int i, char text[768]) {
    const gmm_runtime *rt = &r->rt[i];
    int bad = ranks_failed(r, i, gmm_ranks_capture_begin(r->ranks, i, r->stream[i][0]), text);
    if (bad) return 1;
    bad = ranks_failed(r, i, rt->fill(rt->self, r->values[i], 0, sizeof r->values[i], r->stream[i][0]), text) ||
          ranks_failed(r, i, rt->event_record(rt->self, r->event[i], r->stream[i][0], 0), text) ||
          ranks_failed(r, i, rt->stream_wait(rt->self, r->stream[i][1], r->event[i], 0), text) ||
          ranks_failed(r, i, r->comm[i].all_gather(r->comm[i].self, r->values[i], r->gathered[i],
                                                   sizeof r->values[i], r->stream[i][1]), text) ||
          ranks_failed(r, i, rt->event_record(rt->self, r->event[i], r->stream[i][1], 0), text) ||
          ranks_failed(r, i, rt->stream_wait(rt->self, r->stream[i][0], r->event[i], 0), text);
    if (bad) { /* the capture ends all the same; what it says of the missing join is of no interest */
        (void)gmm_ranks_capture_end(r->ranks, i, r->stream[i][0], &r->graph[i]);
        return 1;
    }
    return ranks_failed(r, i, gmm_ranks_capture_end(r->ranks, i, r->stream[i][0], &r->graph[i]), text) ||
           ranks_failed(r, i, gmm_ranks_launch(r->graph[i], r->stream[i][0]), text);
}

static int ranks_program(char text[768]) {
    static const int32_t members[RANKS] = {0, 1};
    gmm_ranks_config config = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    const char *race = "";
    ranks_run r;
    int bad = 0;
    memset(&r, 0, sizeof r);
    config.ranks = RANKS;
    config.seed = 3;
    config.timeout_ms = 2000;
    config.check_races = 1;
    if (failed(gmm_ranks_create(&config, &r.ranks, &e), e.text, text)) return 0;
    bad = ranks_failed(&r, 0, gmm_ranks_comms(r.ranks, members, RANKS, r.comm), text);
    for (int i = 0; i < RANKS && !bad; i++) {
        bad = ranks_failed(&r, i, gmm_ranks_runtime(r.ranks, i, &r.rt[i]), text);
        for (int k = 0; k < 2 && !bad; k++)
            bad = ranks_failed(&r, i, r.rt[i].stream_create(r.rt[i].self, 0, &r.stream[i][k]), text);
        if (!bad) bad = ranks_failed(&r, i, r.rt[i].event_create(r.rt[i].self, &r.event[i]), text);
    }
    for (int i = 0; i < RANKS && !bad; i++) bad = ranks_enqueue(&r, i, text);
    if (!bad) bad = ranks_failed(&r, 0, gmm_ranks_run(r.ranks), text);
    for (int i = 0; i < RANKS && !bad; i++)
        bad = ranks_failed(&r, i, r.rt[i].stream_sync(r.rt[i].self, r.stream[i][1]), text);
    for (int i = 0; i < RANKS && !bad; i++) bad = ranks_capture(&r, i, text);
    if (!bad) bad = ranks_failed(&r, 0, gmm_ranks_run(r.ranks), text);
    if (!bad && gmm_ranks_races(r.ranks, &race) > 0) { /* the only calls that cannot fail record accesses */
        bad = 1;
        snprintf(strstr(race, "no memory") ? text : C.wrong, 768, "%s", race);
    }
    for (int i = 0; i < RANKS && bad; i++) /* discards a launch that waits for the other rank: it has the graph */
        if (r.comm[i].give_up) r.comm[i].give_up(r.comm[i].self, "an allocation failed");
    for (int i = 0; i < RANKS; i++) {
        if (r.event[i]) (void)r.rt[i].event_destroy(r.rt[i].self, r.event[i]);
        gmm_ranks_graph_destroy(r.graph[i]);
    }
    gmm_ranks_destroy(r.ranks);
    return !bad;
}

/* A table with both forms of a linear, and what reads it: normalizers, a plan of moves, an import of shards. */
static int tables_program(char text[768]) {
    gmm_ckpt_table *table = NULL;
    gmm_ckpt_plan *plan = NULL;
    gmm_ckpt_linear l = GMM_ZERO;
    gmm_ckpt_report report;
    gmm_ckpt_part part = GMM_ZERO;
    gmm_gtp_stored stored = GMM_ZERO;
    gmm_gtp_item item = GMM_ZERO;
    gmm_shard whole = GMM_ZERO, half;
    gmm_ckpt_tensor target = GMM_ZERO;
    int bad;
    memset(&report, 0, sizeof report);
    bad = failed(gmm_ckpt_table_create(&table, NULL, &report.error), report.error.text, text);
    for (int i = 0; i < 2 && !bad; i++) {
        gmm_ckpt_tensor t = GMM_ZERO;
        t.name = i ? "fc.weight1" : "fc.weight0";
        t.dtype = GMM_F32;
        t.rank = 2;
        t.shape[0] = 4;
        t.shape[1] = 2;
        t.bytes = 32;
        bad = failed(gmm_ckpt_table_add_storage(table, NULL, 32, &t.storage, &report.error), report.error.text, text) ||
              failed(gmm_ckpt_table_add(table, &t, &report), report.error.text, text);
        target = t;
    }
    part.table = table;
    l.path = "fc";
    l.experts = 2;
    l.out = 4;
    l.in = 2;
    l.grouped_weight = 1;
    if (!bad) bad = failed(gmm_ckpt_normalize_hook(&plan, table, "fc.", &l, GMM_CKPT_UPSTREAM, NULL, &report),
                           report.error.text, text);
    gmm_ckpt_plan_destroy(plan);
    plan = NULL;
    target.name = "copy";
    if (!bad && gmm_ckpt_plan_of_moves(&plan, &part, 1, &target, 1, NULL, 0, 1, NULL, &report) != GMM_OK)
        bad = failed(report.error.status, report.error.text, text);
    gmm_ckpt_plan_destroy(plan);
    plan = NULL;
    whole.dtype = GMM_F32;
    whole.rows = 4;
    whole.cols = 2;
    whole.unit = 1;
    half = whole;
    half.gtp_size = 2;
    stored.shard = &whole;
    stored.scale = -1;
    item.name = "w";
    item.shard = &half;
    item.stored = &stored;
    item.stored_count = 1;
    if (!bad) bad = failed(gmm_gtp_import(&plan, &part, 1, &item, 1, NULL, &report), report.error.text, text);
    if (!bad) bad = failed(gmm_ckpt_verify(plan, NULL, 0, &report.error), report.error.text, text);
    gmm_ckpt_plan_destroy(plan);
    plan = NULL;
    item.shard = &whole;
    if (!bad) bad = failed(gmm_gtp_export(&plan, &part, 1, &item, 1, NULL, &report), report.error.text, text);
    gmm_ckpt_plan_destroy(plan);
    gmm_ckpt_table_destroy(table);
    return !bad;
}

/* -------------------------------------------------------------------------------------------------------- Files --- */
#ifdef HAVE_CJSON

static char folder[64], path[2][96], index_path[96];

static st_tensor tensor_of(const char *name) {
    st_tensor t;
    memset(&t, 0, sizeof t);
    t.name = name;
    strcpy(t.dtype, "F32");
    t.rank = 1;
    t.shape[0] = 3;
    return t;
}
static int said(const st_error *e, char text[768]) {
    snprintf(text, 768, "%s", e->text);
    return 0;
}

static int write_program(char text[768]) {
    static const float data[3] = {1, 2, 3};
    static const st_pair metadata[2] = {{"format", "pt"}, {"a", "b\n\xC3\xA9"}};
    st_error e = {""};
    for (int f = 0; f < 2; f++) {
        st_tensor t[2] = {tensor_of(f ? "c" : "a"), tensor_of(f ? "d" : "b")};
        st_writer w;
        if (!st_create(&w, path[f], t, 2, metadata, 2, &e)) return said(&e, text);
        if (!st_write(&w, 0, data, 12, &e) || !st_write(&w, 12, data, 12, &e)) {
            st_abandon(&w);
            return said(&e, text);
        }
        if (!st_commit(&w, &e)) return said(&e, text);
    }
    return 1;
}

static int resume_program(char text[768]) {
    static const float data[3] = {1, 2, 3};
    st_error e = {""};
    st_identity identity;
    st_resume resume = {NULL, NULL, 0};
    char temporary[128];
    snprintf(temporary, sizeof temporary, "%s/half", folder);
    resume.temporary = temporary;
    for (int turn = 0; turn < 2; turn++) {
        st_tensor t = tensor_of("a");
        st_writer w;
        resume.earlier = turn ? &identity : NULL;
        if (!st_create_resumable(&w, path[0], &resume, &t, 1, NULL, 0, &e)) return said(&e, text);
        if (!st_write(&w, 0, data, 12, &e) || !st_writer_identify(&w, &identity, &e)) {
            st_abandon(&w);
            return said(&e, text);
        }
        if (!turn) st_suspend(&w);
        else if (!st_commit(&w, &e)) return said(&e, text);
    }
    return 1;
}

static int index_program(char text[768]) {
    static const char *const files[2] = {"a.safetensors", "b.safetensors"};
    static const int64_t owner[4] = {0, 0, 1, 1};
    st_tensor t[4] = {tensor_of("a"), tensor_of("b"), tensor_of("c"), tensor_of("d")};
    st_error e = {""};
    for (int i = 0; i < 4; i++) t[i].bytes = 12;
    return st_write_index(index_path, files, t, owner, 4, &e) ? 1 : said(&e, text);
}

static int read_program(char text[768]) {
    st_error e = {""};
    st_file file;
    st_set set;
    st_identity identity;
    float data[3];
    int ok = st_open(&file, path[0], &e);
    if (ok) {
        ok = st_find(&file, "b") && st_metadata(&file, "format") && st_read(&file, 0, data, 12, &e) &&
             st_identify(&file, &identity, &e);
        st_close(&file);
    }
    for (int partial = 0; partial < 2 && ok; partial++) {
        ok = partial ? st_set_open_partial(&set, index_path, &e) : st_set_open(&set, index_path, &e);
        if (ok) st_set_close(&set);
    }
    return ok ? 1 : said(&e, text);
}

static int lock_program(char text[768]) {
    char name[96];
    file_error e = {""};
    file_place place;
    file_lock lock;
    snprintf(name, sizeof name, "%s/lock", folder);
    if (!file_place_of(&place, path[0])) return snprintf(text, 768, "no memory"), 0;
    file_place_free(&place);
    if (!file_lock_take(&lock, name, &e)) return snprintf(text, 768, "%s", e.text), 0;
    file_lock_release(&lock);
    return 1;
}
#endif

static gmm_ckpt_table *keys; /* made before allocations are counted */
static int keys_program(char text[768]) {
    static const char *const names[3] = {"a.0.w", "a.1.w", "b"};
    key_patterns patterns;
    key_inventory inventory;
    gmm_ckpt_source source = GMM_ZERO;
    gmm_ckpt_part part = GMM_ZERO;
    int64_t pattern_of[3];
    int ok;
    part.table = keys;
    source.parts = &part;
    source.part_count = 1;
    source.scheme = gmm_ckpt_scheme_of("qwen3-moe");
    ok = key_patterns_of(&patterns, names, 3, pattern_of);
    if (ok) {
        key_patterns_free(&patterns);
        ok = key_inventory_of(&inventory, &source, 4);
        if (ok) key_inventory_free(&inventory);
    }
    return ok ? 1 : (snprintf(text, 768, "no memory"), 0);
}

static void make_keys(void) {
    gmm_ckpt_report report;
    T_CHECK(gmm_ckpt_table_create(&keys, NULL, NULL) == GMM_OK, "table");
    for (int i = 0; i < 6; i++) { /* two layers; the second lacks experts */
        gmm_ckpt_tensor t = GMM_ZERO;
        char name[80];
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s_proj.weight", i / 4, i / 2 % 2,
                 i % 2 ? "up" : "gate");
        t.name = name;
        t.dtype = GMM_F32;
        t.rank = 2;
        t.shape[0] = t.shape[1] = 2;
        t.bytes = 16;
        T_CHECK(gmm_ckpt_table_add_storage(keys, NULL, 16, &t.storage, NULL) == GMM_OK &&
                gmm_ckpt_table_add(keys, &t, &report) == GMM_OK, "table");
    }
}

/* -------------------------------------------------------------------------------------------------------- Cases --- */

static const program library[] = {{context_program, "a context and its events", 2}, {ranks_program, "CPU ranks", 20},
                                  {tables_program, "plans", 10}};
static const program of_keys = {keys_program, "keys", 10};

/* Allocations succeed again, also where a check left the case. */
static void undo_counting(void) {
    memset(&C, 0, sizeof C);
    gmm_ckpt_table_destroy(keys);
    keys = NULL;
}

static void in_library(int arg) {
    t_finally(undo_counting);
    fails_each(&library[arg]);
}

static void in_keys(int arg) {
    (void)arg;
    t_finally(undo_counting);
    make_keys();
    fails_each(&of_keys);
}

#ifdef HAVE_CJSON
static const program of_files[] = {{write_program, "writing", 10}, {index_program, "an index", 2},
                                   {read_program, "reading", 20}, {resume_program, "resuming", 4},
                                   {lock_program, "a lock", 3}};

static int remove_folder(void) {
    char text[96];
    snprintf(text, sizeof text, "rm -r '%s'", folder);
    folder[0] = 0;
    return system(text);
}
static void undo_files(void) {
    undo_counting();
    cJSON_InitHooks(NULL);
    if (folder[0]) (void)!remove_folder();
}

/* Of the C library's own until the first call fails, cJSON's memory is counted too. */
static void in_files(int arg) {
    cJSON_Hooks hooks = {malloc, free};
    char text[768];
    (void)arg;
    strcpy(folder, "/tmp/gmm-tests-XXXXXX");
    if (!mkdtemp(folder)) folder[0] = 0;
    T_CHECK(folder[0], "no folder");
    t_finally(undo_files);
    for (int f = 0; f < 2; f++) snprintf(path[f], sizeof path[f], "%s/%c.safetensors", folder, 'a' + f);
    snprintf(index_path, sizeof index_path, "%s/x.safetensors.index.json", folder);
    cJSON_InitHooks(&hooks);
    for (int i = 0; i < T_COUNT(of_files); i++) {
        fails_each(&of_files[i]);
        if (i == 0) continue;
        T_CHECK(write_program(text) && index_program(text), "%s", text);
    }
    T_CHECK(remove_folder() == 0, "the folder of the files is not removed");
}
#endif

void tests_allocations(void) {
    for (int i = 0; i < T_COUNT(library); i++)
        t_add_host(in_library, i, "allocations that fail: %s", library[i].name);
    t_add_host(in_keys, 0, "allocations that fail: %s", of_keys.name);
#ifdef HAVE_CJSON
    t_add_host(in_files, 0, "allocations that fail: files");
#endif
}
