/* convert_checkpoint.c - expert weights from any layout into any other, over safetensors files of any size.
 * SPDX-License-Identifier: MIT
 *
 * Names, layouts and slices are gmm's checkpoint plans (gmm.h, section 13); this program brings the files: it lists the
 * tensors of the input, lets gmm plan, verify and cost the conversion, and applies the moves from file to file through
 * a scratch of fixed size. Nothing stands under the output's name before it is whole; a run that was stopped goes on
 * where it was.
 *
 *     convert_checkpoint --help
 *
 * CONTENTS
 *     1  Options     3  Output     5  Running
 *     2  Input       4  Reports    6  main
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gmm_gtp.h"
#include "../common/options.h"
#include "../common/progress.h"
#include "../common/safetensors.h"

static void die(const char *format, ...) {
    va_list list;
    fflush(stdout);
    fputs("convert_checkpoint: ", stderr);
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    exit(1);
}

static void *get(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) die("out of memory (%zu bytes)", bytes);
    return p;
}

/* -------------------------------------------------------------------------------------------------- 1 Options --- */

enum { STATES = 16 };

static struct settings {
    const char *in, *out, *from, *to, *prefix, *ep, *etp, *gtp, *dtype, *bias_dtype, *extra, *states, *shard_size;
    int64_t in_glu_block, glu_block, in_ep, in_etp, in_gtp, experts, scratch, cursor_bytes;
    int64_t drop_wrappers, drop_extra_state, dry_run, inspect, restart, quiet, help;
} opt;

#define SCHEMES "megatron|indexed|grouped|sequential|legacy|mixtral|qwen2-moe|qwen3-moe|olmoe|deepseek-v3|fused|" \
                "fused-transposed|gpt-oss"

static option options[] = {
    {"in", OPTION_TEXT, 0, &opt.in, "", 0, 0, "", "file, or index of files (.json); with --in-ep and others a pattern",
     0},
    {"out", OPTION_TEXT, 0, &opt.out, "", 0, 0, "", "file; with --shard-size the index is FILE.index.json", 0},
    {"from", OPTION_CHOICE, 0, &opt.from, "megatron", 0, 0, SCHEMES, "how the input is laid out", 0},
    {"to", OPTION_CHOICE, 0, &opt.to, "indexed", 0, 0, SCHEMES, "how the output shall be laid out", 0},
    {"in-glu-block", OPTION_INTEGER, 0, &opt.in_glu_block, "-1", -1, 1e9, "",
     "gate and up rows of the input: blocks, 0 = halves, -1 = as it records", 0},
    {"glu-block", OPTION_INTEGER, 0, &opt.glu_block, "0", 0, 1e9, "", "and of the output", 0},
    {"ep", OPTION_TEXT, 0, &opt.ep, "0/1", 0, 0, "RANK/SIZE", "the part of this rank of expert parallelism", 0},
    {"etp", OPTION_TEXT, 0, &opt.etp, "0/1", 0, 0, "RANK/SIZE", "of expert tensor parallelism", 0},
    {"gtp", OPTION_TEXT, 0, &opt.gtp, "0/1", 0, 0, "RANK/SIZE", "of generalized tensor parallelism", 0},
    {"in-ep", OPTION_INTEGER, 0, &opt.in_ep, "1", 1, 65536, "", "ranks of the input: {ep} in --in counts them", 0},
    {"in-etp", OPTION_INTEGER, 0, &opt.in_etp, "1", 1, 65536, "", "the same for {etp}", 0},
    {"in-gtp", OPTION_INTEGER, 0, &opt.in_gtp, "1", 1, 65536, "", "the same for {gtp}", 0},
    {"experts", OPTION_INTEGER, 0, &opt.experts, "0", 0, 1e9, "",
     "experts of a layer, where no shape tells (legacy) or routers have spare rows", 0},
    {"dtype", OPTION_CHOICE, 0, &opt.dtype, "keep", 0, 0, "keep|bf16|f16|f32",
     "of expert weights; all but keep dequantize",
     0},
    {"bias-dtype", OPTION_CHOICE, 0, &opt.bias_dtype, "keep", 0, 0, "keep|bf16|f16|f32", "of expert biases", 0},
    {"prefix", OPTION_TEXT, 0, &opt.prefix, "", 0, 0, "TEXT", "in front of all keys, with its dot; default: found", 0},
    {"drop-wrappers", OPTION_SWITCH, 0, &opt.drop_wrappers, "0", 0, 1, "",
     "leave module, _orig_mod and other wrappers' segments out of all names", 0},
    {"states", OPTION_TEXT, 0, &opt.states, "optimizer.exp_avg.,optimizer.exp_avg_sq.", 0, 0, "LIST",
     "prefixes of trees like that of the weights", 0},
    {"extra", OPTION_CHOICE, 0, &opt.extra, "keep", 0, 0, "keep|drop|refuse", "tensors of no expert layer", 0},
    {"drop-extra-state", OPTION_SWITCH, 0, &opt.drop_extra_state, "0", 0, 1, "", "leave _extra_state tensors out", 0},
    {"shard-size", OPTION_TEXT, 0, &opt.shard_size, "0", 0, 0, "BYTES", "of an output file, as 5G or 500M; 0 = one",
     0},
    {"scratch", OPTION_INTEGER, 0, &opt.scratch, "64", 1, 1 << 20, "", "MiB of memory to convert through", 0},
    {"cursor-bytes", OPTION_INTEGER, 0, &opt.cursor_bytes, "1000000000", 1, 9e18, "",
     "written between two notes of how far the run is", 0},
    {"dry-run", OPTION_SWITCH, 0, &opt.dry_run, "0", 0, 1, "", "plan and verify, print the cost, write nothing", 0},
    {"inspect", OPTION_SWITCH, 0, &opt.inspect, "0", 0, 1, "", "print what the input holds", 0},
    {"restart", OPTION_SWITCH, 0, &opt.restart, "0", 0, 1, "", "do not go on with an earlier run", 0},
    {"quiet", OPTION_SWITCH, 0, &opt.quiet, "0", 0, 1, "", "print errors only", 0},
    {"help", OPTION_SWITCH, 0, &opt.help, "0", 0, 1, "", "this text", 0},
};
enum { OPTIONS = sizeof options / sizeof options[0] };

static int given(const void *value) {
    for (int i = 0; i < OPTIONS; i++)
        if (options[i].value == value) return options[i].given;
    return 0;
}

static void print_help(void) {
    printf("usage: convert_checkpoint --in FILE --out FILE [options]\n"
           "Converts the expert weights of a safetensors checkpoint between layouts. Options:\n\n");
    options_print(options, OPTIONS);
    printf("\nindexed and grouped are megatron with weight0... and with one stacked weight; olmoe is qwen3-moe.\n");
}

/* indexed and grouped are one scheme with a choice; others have no choice. */
static const gmm_ckpt_scheme *scheme_of(const char *name) {
    if (!strcmp(name, "indexed") || !strcmp(name, "grouped")) name = "megatron";
    if (!strcmp(name, "olmoe")) name = "qwen3-moe";
    return gmm_ckpt_scheme_of(name);
}

static gmm_dtype dtype_of(const char *name) {
    if (!strcmp(name, "f32")) return GMM_F32;
    if (!strcmp(name, "f16")) return GMM_F16;
    return !strcmp(name, "bf16") ? GMM_BF16 : GMM_NONE;
}

static void rank_of(const char *name, const char *text, int32_t *rank, int32_t *size) {
    char rest;
    int r, s;
    if (sscanf(text, "%9d/%9d%c", &r, &s, &rest) != 2 || s < 1 || r < 0 || r >= s)
        die("--%s takes RANK/SIZE with 0 <= RANK < SIZE, not \"%s\"", name, text);
    *rank = r;
    *size = s;
}

static int64_t bytes_of(const char *name, const char *text) {
    char *end = NULL;
    const double value = strtod(text, &end);
    const double unit = *end == 'G' ? 1e9 : *end == 'M' ? 1e6 : *end == 'K' ? 1e3 : 1;
    if (end == text || (unit > 1 && *++end) || *end || !(value >= 0) || value * unit > 9e18)
        die("--%s takes a number of bytes, as 5G or 500M, not \"%s\"", name, text);
    return (int64_t)(value * unit);
}

/* ---------------------------------------------------------------------------------------------------- 2 Input --- */

/* dtypes that gmm knows; the others can be kept only. */
static const struct { const char *file; gmm_dtype dtype; } dtypes[] = {
    {"F32", GMM_F32}, {"F16", GMM_F16}, {"BF16", GMM_BF16}, {"F8_E4M3", GMM_E4M3}, {"F8_E5M2", GMM_E5M2},
    {"F8_E8M0", GMM_E8M0}, {"F4", GMM_E2M1}, {"U8", GMM_U8}, {"I32", GMM_I32}, {"I64", GMM_I64}};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

static gmm_dtype dtype_in(const char *name) {
    for (int i = 0; i < DTYPES; i++)
        if (!strcmp(dtypes[i].file, name)) return dtypes[i].dtype;
    return GMM_NONE;
}

static const char *dtype_out(gmm_dtype dtype) {
    for (int i = 0; i < DTYPES; i++)
        if (dtypes[i].dtype == dtype) return dtypes[i].file;
    return "?";
}

typedef struct input {
    st_set *sets;                /* one for each rank */
    gmm_ckpt_part *parts;
    gmm_ckpt_table **tables;
    const st_tensor **tensors;   /* by tag - 1 */
    int64_t tensor_count, bytes;
    int32_t count;
    gmm_ckpt_glu recorded;
} input;

/* The pattern with {ep}, {etp}, {gtp} filled in. */
static char *path_of(const char *pattern, const gmm_ckpt_rank *r) {
    const struct { const char *name; int32_t rank; } fields[] = {
        {"{ep}", r->ep_rank}, {"{etp}", r->etp_rank}, {"{gtp}", r->gtp_rank}};
    const size_t room = strlen(pattern) + 64;
    char *path = (char *)get(room);
    size_t n = 0;
    while (*pattern && n + 16 < room) {
        int i;
        for (i = 0; i < 3; i++)
            if (!strncmp(pattern, fields[i].name, strlen(fields[i].name))) break;
        if (i == 3) {
            path[n++] = *pattern++;
            continue;
        }
        n += (size_t)snprintf(path + n, room - n, "%d", (int)fields[i].rank);
        pattern += strlen(fields[i].name);
    }
    return path;
}

/* What a file records of its layout must agree with the command line. */
static void check_metadata(input *in, const st_file *file, const char *path, const gmm_ckpt_rank *r) {
    const struct { const char *key; int32_t rank, size; } ranks[] = {
        {"gmm.ep", r->ep_rank, r->ep_size}, {"gmm.etp", r->etp_rank, r->etp_size},
        {"gmm.gtp", r->gtp_rank, r->gtp_size}};
    const char *layout = st_metadata(file, "gmm.layout"), *block = st_metadata(file, "gmm.glu_block");
    char *end = NULL;
    if (layout && !given(&opt.from) && scheme_of(layout)) opt.from = layout;
    if (layout && strcmp(layout, scheme_of(opt.from)->name))
        die("%s: it records the layout %s, but --from says %s", path, layout, opt.from);
    for (int i = 0; i < 3; i++) {
        char want[32];
        const char *recorded = st_metadata(file, ranks[i].key);
        snprintf(want, sizeof want, "%d/%d", (int)ranks[i].rank, (int)ranks[i].size);
        if (recorded && strcmp(recorded, want))
            die("%s: it records %s %s, but is read as %s", path, ranks[i].key, recorded, want);
    }
    if (block) {
        const long value = strtol(block, &end, 10);
        if (end == block || *end || value < 0 || value > INT32_MAX)
            die("%s: its metadata has no valid gmm.glu_block: \"%.60s\"", path, block);
        if (in->recorded.known && in->recorded.block != (int32_t)value)
            die("%s: it records gmm.glu_block %ld, another file %d", path, value, (int)in->recorded.block);
        in->recorded.known = 1;
        in->recorded.block = (int32_t)value;
    }
}

static void read_part(input *in, int32_t p, const gmm_ckpt_rank *rank) {
    char *path = path_of(opt.in, rank);
    gmm_ckpt_report report;
    st_error error;
    if (!st_set_open(&in->sets[p], path, &error)) die("%s", error.text);
    in->parts[p].rank = *rank;
    if (gmm_ckpt_table_create(&in->tables[p], NULL, &report.error)) die("%s", report.error.text);
    for (int64_t f = 0; f < in->sets[p].count; f++) {
        const st_file *file = &in->sets[p].files[f];
        int32_t storage;
        check_metadata(in, file, in->sets[p].paths[f], rank);
        if (gmm_ckpt_table_add_storage(in->tables[p], NULL, file->data_bytes, &storage, &report.error))
            die("%s", report.error.text);
        in->tensors = (const st_tensor **)realloc((void *)in->tensors,
                                                  (size_t)(in->tensor_count + file->count + 1) * sizeof *in->tensors);
        if (!in->tensors) die("out of memory");
        for (int64_t i = 0; i < file->count; i++) {
            const st_tensor *s = &file->tensors[i];
            gmm_ckpt_tensor t = GMM_ZERO;
            in->tensors[in->tensor_count++] = s;
            t.name = s->name;
            t.dtype = dtype_in(s->dtype);
            t.rank = s->rank;
            memcpy(t.shape, s->shape, sizeof t.shape);
            t.storage = storage;
            t.offset = s->begin;
            t.bytes = s->bytes;
            t.tag = in->tensor_count;
            if (gmm_ckpt_table_add(in->tables[p], &t, &report)) die("%s: %s", in->sets[p].paths[f], report.error.text);
        }
        in->bytes += file->data_bytes;
    }
    in->parts[p].table = in->tables[p];
    free(path);
}

static input read_input(void) {
    input in;
    memset(&in, 0, sizeof in);
    in.count = (int32_t)(opt.in_ep * opt.in_etp * opt.in_gtp);
    in.sets = (st_set *)get((size_t)in.count * sizeof *in.sets);
    in.parts = (gmm_ckpt_part *)get((size_t)in.count * sizeof *in.parts);
    in.tables = (gmm_ckpt_table **)get((size_t)in.count * sizeof *in.tables);
    for (int32_t p = 0; p < in.count; p++) {
        gmm_ckpt_rank r;
        r.ep_size = (int32_t)opt.in_ep;
        r.etp_size = (int32_t)opt.in_etp;
        r.gtp_size = (int32_t)opt.in_gtp;
        r.gtp_rank = p % r.gtp_size;
        r.etp_rank = p / r.gtp_size % r.etp_size;
        r.ep_rank = p / r.gtp_size / r.etp_size;
        read_part(&in, p, &r);
    }
    return in;
}

static void close_input(input *in) {
    for (int32_t p = 0; p < in->count; p++) {
        gmm_ckpt_table_destroy(in->tables[p]);
        st_set_close(&in->sets[p]);
    }
    free(in->sets);
    free(in->parts);
    free(in->tables);
    free((void *)in->tensors);
}

/* --------------------------------------------------------------------------------------------------- 3 Output --- */

typedef struct output {
    st_writer *writers;
    char **names;              /* of the files, without the folder */
    char **paths, **temporaries;
    int64_t count;
    st_tensor *tensors;        /* as the plan's targets */
    int64_t *owner;            /* the file of each */
    int64_t tensor_count;
    char *index, *cursor_path; /* index: NULL for one file */
} output;

static char *format_path(const char *format, ...) {
    va_list list;
    int n;
    char *path;
    va_start(list, format);
    n = vsnprintf(NULL, 0, format, list);
    va_end(list);
    path = (char *)get((size_t)n + 1);
    va_start(list, format);
    vsnprintf(path, (size_t)n + 1, format, list);
    va_end(list);
    return path;
}

static uint64_t hash(uint64_t h, const void *data, size_t bytes) { /* FNV-1a */
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) h = (h ^ p[i]) * 1099511628211u;
    return h;
}

/* What a cursor belongs to: these files, as they are now, and this plan. */
static uint64_t hash_run(const input *in, const gmm_ckpt_plan *plan) {
    uint64_t h = 14695981039346656037u;
    int64_t n;
    const gmm_ckpt_move *moves = gmm_ckpt_plan_moves(plan, &n);
    const gmm_ckpt_tensor *t;
    h = hash(h, moves, (size_t)n * sizeof *moves);
    t = gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), &n);
    for (int64_t i = 0; i < n; i++) h = hash(h, t[i].name, strlen(t[i].name) + 1);
    for (int32_t p = 0; p < in->count; p++)
        for (int64_t f = 0; f < in->sets[p].count; f++) {
            struct stat about;
            memset(&about, 0, sizeof about);
            if (stat(in->sets[p].paths[f], &about)) die("%s: %s", in->sets[p].paths[f], strerror(errno));
            h = hash(h, in->sets[p].paths[f], strlen(in->sets[p].paths[f]));
            h = hash(h, &about.st_size, sizeof about.st_size);
            h = hash(h, &about.st_mtim, sizeof about.st_mtim);
        }
    return h;
}

static int64_t read_cursor(const output *o, uint64_t run) {
    FILE *file = fopen(o->cursor_path, "r");
    unsigned long long stored = 0;
    long long cursor = -1;
    if (!file) return -1;
    if (fscanf(file, "gmm-convert 1 %llx %lld", &stored, &cursor) != 2 || stored != run) cursor = -1;
    fclose(file);
    return cursor;
}

/* What was written so far reaches the disk first, so that the cursor never says more than is there. */
static void write_cursor(output *o, uint64_t run, int64_t cursor) {
    char *temporary = format_path("%s.tmp", o->cursor_path);
    st_error error;
    FILE *file;
    for (int64_t i = 0; i < o->count; i++)
        if (!st_flush(&o->writers[i], &error)) die("%s: %s", o->paths[i], error.text);
    file = fopen(temporary, "w");
    if (!file || fprintf(file, "gmm-convert 1 %016llx %lld\n", (unsigned long long)run, (long long)cursor) < 0 ||
        fflush(file) || fsync(fileno(file)) || fclose(file) || rename(temporary, o->cursor_path))
        die("cannot write %s: %s", o->cursor_path, strerror(errno));
    free(temporary);
}

/* Spreads the targets over files of at most `limit` bytes, in order. */
static void lay_out(output *o, const input *in, const gmm_ckpt_plan *plan, int64_t limit) {
    const gmm_ckpt_tensor *t = gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), &o->tensor_count);
    const char *slash = strrchr(opt.out, '/'), *name = slash ? slash + 1 : opt.out;
    const size_t stem = strlen(name) > 12 && !strcmp(name + strlen(name) - 12, ".safetensors") ? strlen(name) - 12
                                                                                               : strlen(name);
    int64_t size = 0;
    o->tensors = (st_tensor *)get((size_t)o->tensor_count * sizeof *o->tensors);
    o->owner = (int64_t *)get((size_t)o->tensor_count * sizeof *o->owner);
    o->count = 1;
    for (int64_t i = 0; i < o->tensor_count; i++) {
        st_tensor *s = &o->tensors[i];
        s->name = t[i].name;
        snprintf(s->dtype, sizeof s->dtype, "%s", t[i].tag ? in->tensors[t[i].tag - 1]->dtype : dtype_out(t[i].dtype));
        s->rank = t[i].rank;
        s->bytes = t[i].bytes;
        memcpy(s->shape, t[i].shape, sizeof s->shape);
        if (limit && size && t[i].bytes > limit - size) {
            o->count++;
            size = 0;
        }
        size += t[i].bytes;
        o->owner[i] = o->count - 1;
    }
    o->writers = (st_writer *)get((size_t)o->count * sizeof *o->writers);
    o->names = (char **)get((size_t)o->count * sizeof *o->names);
    o->paths = (char **)get((size_t)o->count * sizeof *o->paths);
    o->temporaries = (char **)get((size_t)o->count * sizeof *o->temporaries);
    for (int64_t i = 0; i < o->count; i++) {
        o->names[i] = limit ? format_path("%.*s-%05lld-of-%05lld.safetensors", (int)stem, name, (long long)i + 1,
                                          (long long)o->count) : format_path("%s", name);
        o->paths[i] = format_path("%.*s%s", (int)(name - opt.out), opt.out, o->names[i]);
        o->temporaries[i] = format_path("%s.partial", o->paths[i]);
    }
    if (limit) o->index = format_path("%s.index.json", opt.out);
    o->cursor_path = format_path("%s.resume", opt.out);
}

/* No output may be one of the inputs. */
static void check_apart(const input *in, const output *o) {
    for (int64_t i = 0; i < o->count; i++) {
        struct stat a, b;
        if (stat(o->paths[i], &a)) continue;
        for (int32_t p = 0; p < in->count; p++)
            for (int64_t f = 0; f < in->sets[p].count; f++)
                if (!stat(in->sets[p].paths[f], &b) && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
                    die("%s: the output would replace the input", o->paths[i]);
    }
}

enum { PAIRS = 8 };

/* The input's metadata, and the layout. */
static st_pair *metadata_of(const input *in, char (*text)[32], int64_t *count) {
    const st_file *first = &in->sets[0].files[0];
    const gmm_ckpt_scheme *to = scheme_of(opt.to);
    st_pair *pairs = (st_pair *)get((size_t)(first->metadata_count + PAIRS) * sizeof *pairs);
    const st_pair own[] = {{"gmm.layout", to->name}, {"gmm.glu_block", text[0]}, {"gmm.ep", opt.ep},
                           {"gmm.etp", opt.etp}, {"gmm.gtp", opt.gtp}};
    *count = 0;
    for (int64_t i = 0; i < first->metadata_count; i++)
        if (strncmp(first->metadata[i].key, "gmm.", 4)) pairs[(*count)++] = first->metadata[i];
    snprintf(text[0], sizeof text[0], "%d", to->glu_known ? (int)to->glu_block : (int)opt.glu_block);
    for (int i = 0; i < 5; i++)
        if (i < 2 || strcmp(own[i].value, "0/1")) pairs[(*count)++] = own[i];
    return pairs;
}

/* Opens all files. With `resume` those of the earlier run; 0 if they are not all there. */
static int open_output(output *o, const input *in, int resume) {
    char text[1][32];
    int64_t count, first = 0;
    st_pair *pairs = metadata_of(in, text, &count);
    st_error error;
    for (int64_t i = 0; i < o->count; i++) {
        int64_t n = 0;
        while (first + n < o->tensor_count && o->owner[first + n] == i) n++;
        if (!st_create_resumable(&o->writers[i], o->paths[i], o->temporaries[i], resume, o->tensors + first, n, pairs,
                                 count, &error))
            die("%s: %s", o->paths[i], error.text);
        first += n;
        if (resume && !o->writers[i].resumed) {
            for (int64_t k = 0; k < i; k++) st_suspend(&o->writers[k]);
            st_abandon(&o->writers[i]);
            resume = -1;
            break;
        }
    }
    free(pairs);
    return resume >= 0;
}

/* -------------------------------------------------------------------------------------------------- 4 Reports --- */

static const char *size_text(double bytes, char *text, size_t room) {
    const char *const units[] = {"B", "KB", "MB", "GB", "TB", "PB"};
    int u = 0;
    for (; bytes >= 1000 && u < 5; u++) bytes /= 1000;
    snprintf(text, room, u ? "%.2f %s" : "%.0f %s", bytes, units[u]);
    return text;
}

static void print_linear(const gmm_ckpt_linear *l) {
    static const char *const names[] = {
#define SLOT(name, value, text, grouped, rows, cols) #text,
        GMM_CKPT_SLOT_LIST(SLOT)
#undef SLOT
    };
    printf("  layer %-4lld %-18s %6lld x %6lld x %6lld%s%s\n", (long long)l->layer, names[l->slot],
           (long long)l->experts, (long long)l->out, (long long)l->in, l->gated ? "  gated" : "",
           l->bias ? "  bias" : "");
}

static void inspect(const input *in, const gmm_ckpt_linear *l, int64_t linears) {
    char text[32];
    int64_t files = 0, i;
    for (int32_t p = 0; p < in->count; p++) files += in->sets[p].count;
    printf("%s: %lld tensors, %s in %lld file%s\n", opt.in, (long long)in->tensor_count,
           size_text((double)in->bytes, text, sizeof text), (long long)files, files == 1 ? "" : "s");
    printf("read as %s; gate and up rows: ", scheme_of(opt.from)->name);
    if (in->recorded.known) printf("blocks of %d (0 = halves) are recorded\n", (int)in->recorded.block);
    else printf("%s\n", scheme_of(opt.from)->glu_known ? "as the layout says" : "not recorded");
    for (i = 0; i < in->sets[0].files[0].metadata_count; i++)
        printf("  metadata %s = %s\n", in->sets[0].files[0].metadata[i].key, in->sets[0].files[0].metadata[i].value);
    printf("linears: experts x out x in\n");
    for (i = 0; i < linears; i++) print_linear(&l[i]);
}

static void print_cost(const gmm_ckpt_plan *plan, const gmm_ckpt_report *report) {
    static const char *const kinds[] = {"views", "copies", "conversions", "dequantizations", "zero fills"};
    gmm_ckpt_cost cost = GMM_ZERO;
    gmm_error error;
    char a[32], b[32], c[32];
    int64_t n;
    if (gmm_ckpt_cost_of(plan, &cost, &error)) die("%s", error.text);
    (void)gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), &n);
    printf("plan: %lld tensors used, %lld kept, %lld dropped; %lld tensors come out\n", (long long)report->matched,
           (long long)report->kept, (long long)report->dropped, (long long)n);
    printf("moves:");
    for (int i = 0; i < 5; i++)
        if (cost.moves[i]) printf("  %lld %s", (long long)cost.moves[i], kinds[i]);
    printf("\ncost: %s read, %s written, scratch at least %s\n", size_text((double)cost.bytes_read, a, sizeof a),
           size_text((double)cost.bytes_written, b, sizeof b), size_text((double)cost.scratch_min, c, sizeof c));
    printf("verified: every byte of every target is written once\n");
}

/* -------------------------------------------------------------------------------------------------- 5 Running --- */

typedef struct transfer {
    const input *in;
    output *out;
    const gmm_ckpt_plan *plan;
    progress bar;
    int64_t written, total;
    st_error error;
    const char *where; /* the file that failed */
} transfer;

static int transfer_read(void *user, int32_t part, int32_t storage, int64_t offset, void *to, int64_t bytes) {
    transfer *t = (transfer *)user;
    t->where = t->in->sets[part].paths[storage];
    return !st_read(&t->in->sets[part].files[storage], offset, to, bytes, &t->error);
}

static int transfer_write(void *user, int64_t target, int64_t offset, const void *from, int64_t bytes) {
    transfer *t = (transfer *)user;
    char status[128], done[32], all[32], speed[32];
    const double seconds = progress_seconds() - t->bar.began;
    const int64_t file = t->out->owner[target];
    t->where = t->out->temporaries[file];
    if (!st_write(&t->out->writers[file], t->out->tensors[target].begin + offset, from, bytes, &t->error)) return 1;
    t->written += bytes;
    if (t->bar.terminal) {
        size_text((double)t->written, done, sizeof done);
        size_text((double)t->total, all, sizeof all);
        size_text(seconds > 0 ? (double)(t->written - t->bar.first) / seconds : 0, speed, sizeof speed);
        snprintf(status, sizeof status, "%s of %s, %s/s", done, all, speed);
        progress_update(&t->bar, t->written, status);
    }
    return 0;
}

/* Bytes that moves [begin, end) write. */
static int64_t bytes_of_moves(const gmm_ckpt_plan *plan, int64_t begin, int64_t end) {
    const gmm_ckpt_tensor *t = gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), NULL);
    const gmm_ckpt_move *m = gmm_ckpt_plan_moves(plan, NULL);
    int64_t sum = 0;
    for (int64_t i = begin; i < end; i++) {
        const int32_t bits = gmm_dtype_bits(t[m[i].dst].dtype);
        int64_t bytes = bits < 8 ? 1 : bits / 8;
        for (int l = 0; l < m[i].loops; l++) bytes *= m[i].count[l];
        sum += bytes;
    }
    return sum;
}

static void convert(const input *in, const gmm_ckpt_plan *plan) {
    gmm_ckpt_cost cost = GMM_ZERO;
    gmm_ckpt_run run = GMM_ZERO;
    gmm_error error;
    output o;
    transfer t;
    int64_t cursor = -1, moves;
    uint64_t id;
    char text[32], speed[32];
    double seconds;
    memset(&o, 0, sizeof o);
    memset(&t, 0, sizeof t);
    if (gmm_ckpt_cost_of(plan, &cost, &error)) die("%s", error.text);
    (void)gmm_ckpt_plan_moves(plan, &moves);
    lay_out(&o, in, plan, bytes_of("shard-size", opt.shard_size));
    check_apart(in, &o);
    id = hash_run(in, plan);
    if (!opt.restart) cursor = read_cursor(&o, id);
    if (cursor > moves || (cursor >= 0 && !open_output(&o, in, 1))) cursor = -1;
    if (cursor >= 0 && !opt.quiet)
        printf("going on after move %lld of %lld of an earlier run\n", (long long)cursor, (long long)moves);
    if (cursor < 0) {
        cursor = 0;
        (void)unlink(o.cursor_path);
        (void)open_output(&o, in, 0);
        write_cursor(&o, id, 0);
    }
    run.scratch_bytes = (size_t)opt.scratch << 20;
    if (run.scratch_bytes < (size_t)cost.scratch_min) run.scratch_bytes = (size_t)cost.scratch_min;
    run.scratch = malloc(run.scratch_bytes);
    if (!run.scratch) die("out of memory");
    t.in = in;
    t.out = &o;
    t.plan = plan;
    t.total = cost.bytes_written;
    t.written = bytes_of_moves(plan, 0, cursor);
    t.bar = progress_begin(stdout, t.written, t.total, (int)opt.quiet);
    run.io.user = &t;
    run.io.read = transfer_read;
    run.io.write = transfer_write;
    while (cursor < moves) {
        int64_t left = opt.cursor_bytes;
        for (run.end = cursor; run.end < moves && left > 0; run.end++)
            left -= bytes_of_moves(plan, run.end, run.end + 1);
        if (gmm_ckpt_apply(plan, &run, &cursor, &error)) {
            progress_clear(&t.bar);
            write_cursor(&o, id, cursor);
            die("%s: %s (%s)\nwhat was done is kept: the same command goes on from there", t.where ? t.where : opt.in,
                t.error.text, error.text);
        }
        if (cursor < moves) write_cursor(&o, id, cursor);
    }
    progress_clear(&t.bar);
    for (int64_t i = 0; i < o.count; i++)
        if (!st_commit(&o.writers[i], &t.error)) die("%s", t.error.text);
    if (o.index && !st_write_index(o.index, (const char *const *)o.names, o.tensors, o.owner, o.tensor_count, &t.error))
        die("%s", t.error.text);
    (void)unlink(o.cursor_path);
    seconds = progress_seconds() - t.bar.began;
    if (!opt.quiet)
        printf("%s: %s in %.1f s, %s/s\n", o.index ? o.index : opt.out, size_text((double)t.written, text, sizeof text),
               seconds, size_text(seconds > 0 ? (double)(t.written - t.bar.first) / seconds : 0, speed, sizeof speed));
    for (int64_t i = 0; i < o.count; i++) {
        free(o.names[i]);
        free(o.paths[i]);
        free(o.temporaries[i]);
    }
    free(o.names);
    free(o.paths);
    free(o.temporaries);
    free(o.writers);
    free(o.tensors);
    free(o.owner);
    free(o.index);
    free(o.cursor_path);
    free(run.scratch);
}

/* ----------------------------------------------------------------------------------------------------- 6 main --- */

/* The rows that the rank keeps of every linear; NULL without generalized tensor parallelism. */
static gmm_ckpt_cut *cuts_of(const gmm_ckpt_linear *l, int64_t n, const gmm_ckpt_rank *rank, int32_t block) {
    gmm_ckpt_cut *cuts = (gmm_ckpt_cut *)get((size_t)n * sizeof *cuts);
    gmm_error error;
    if (rank->gtp_size == 1) {
        free(cuts);
        return NULL;
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t halves[2] = {l[i].out / 2, l[i].out / 2};
        const int fc1 = l[i].slot == GMM_CKPT_FC1;
        gmm_shard shard = GMM_ZERO;
        gmm_shard_plan plan = GMM_ZERO;
        if (!fc1 && l[i].slot != GMM_CKPT_FC2) continue;
        shard.scaling = l[i].scaling == GMM_SCALING_128X128 && !strcmp(opt.dtype, "keep") ? l[i].scaling
                                                                                          : GMM_SCALING_NONE;
        shard.dtype = shard.scaling ? GMM_E4M3 : GMM_BF16;
        shard.tp_cut = fc1 ? GMM_TP_ROWS : GMM_TP_COLS;
        shard.tp_rank = rank->etp_rank;
        shard.tp_size = rank->etp_size;
        shard.gtp_rank = rank->gtp_rank;
        shard.gtp_size = rank->gtp_size;
        shard.rows = l[i].out;
        shard.cols = l[i].in;
        if (l[i].gated && block) shard.tp_multiple = 2 * block;
        if (l[i].gated && !block) {
            shard.section_rows = halves;
            shard.sections = 2;
        }
        if (gmm_gtp_plan(&shard, &plan, &error)) die("layer %lld: %s", (long long)l[i].layer, error.text);
        cuts[i].row0 = plan.row0 < plan.local_rows ? plan.row0 : plan.local_rows;
        cuts[i].rows = cuts[i].stored_rows = plan.valid_rows; /* files hold no padding */
    }
    return cuts;
}

int main(int argc, char **argv) {
    const char *states[STATES] = {""};
    char *list;
    int32_t state_count = 1;
    option_error wrong;
    input in;
    gmm_ckpt_source source = GMM_ZERO;
    gmm_ckpt_target target = GMM_ZERO;
    gmm_ckpt_linear *linears = NULL;
    gmm_ckpt_cut *cuts;
    gmm_ckpt_plan *plan = NULL;
    gmm_ckpt_report report;
    int64_t count = 0;
    static const char *const wrappers[] = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"};
    if (!options_parse(options, OPTIONS, argc, argv, &wrong)) die("%s", wrong.text);
    if (opt.help || argc == 1) {
        print_help();
        return 0;
    }
    if (st_missing()) die("%s", st_missing());
    if (!*opt.in) die("--in is needed (--help lists the options)");
    if (!*opt.out && !opt.dry_run && !opt.inspect) die("--out is needed, or --dry-run, or --inspect");
    list = format_path("%s", opt.states);
    for (char *s = strtok(list, ","); s; s = strtok(NULL, ",")) {
        if (state_count == STATES) die("--states: at most %d", STATES - 1);
        states[state_count++] = s;
    }
    rank_of("ep", opt.ep, &target.rank.ep_rank, &target.rank.ep_size);
    rank_of("etp", opt.etp, &target.rank.etp_rank, &target.rank.etp_size);
    rank_of("gtp", opt.gtp, &target.rank.gtp_rank, &target.rank.gtp_size);
    (void)bytes_of("shard-size", opt.shard_size);
    if (opt.in_ep * opt.in_etp * opt.in_gtp > 65536) die("--in-ep, --in-etp, --in-gtp: more than 65536 ranks");
    if (opt.in_ep > 1 && !strstr(opt.in, "{ep}")) die("--in lacks {ep}, which --in-ep counts"); /* one file twice */
    if (opt.in_etp > 1 && !strstr(opt.in, "{etp}")) die("--in lacks {etp}, which --in-etp counts");
    if (opt.in_gtp > 1 && !strstr(opt.in, "{gtp}")) die("--in lacks {gtp}, which --in-gtp counts");
    in = read_input();

    source.parts = in.parts;
    source.part_count = in.count;
    source.scheme = scheme_of(opt.from);
    source.prefix = given(&opt.prefix) ? opt.prefix : NULL;
    source.wrappers = wrappers;
    source.wrapper_count = sizeof wrappers / sizeof wrappers[0];
    source.states = states;
    source.state_count = state_count;
    source.recorded = in.recorded;
    source.stated.known = opt.in_glu_block >= 0;
    source.stated.block = opt.in_glu_block >= 0 ? (int32_t)opt.in_glu_block : 0;
    source.extra = !strcmp(opt.extra, "keep") ? GMM_CKPT_EXTRA_KEEP
                 : !strcmp(opt.extra, "drop") ? GMM_CKPT_EXTRA_DROP : GMM_CKPT_EXTRA_REFUSE;
    source.drop_extra_state = (int32_t)opt.drop_extra_state;
    if (gmm_ckpt_scan(&source, opt.experts, &linears, &count, NULL, &report)) die("%s: %s", opt.in, report.error.text);
    if (opt.inspect) inspect(&in, linears, count);
    if (!count) die("%s: no tensor of it is an expert's in the layout %s", opt.in, opt.from);

    target.scheme = scheme_of(opt.to);
    target.glu_block = (int32_t)opt.glu_block;
    target.dtype = dtype_of(opt.dtype);
    target.bias_dtype = dtype_of(opt.bias_dtype);
    target.drop_wrappers = (int32_t)opt.drop_wrappers;
    for (int64_t i = 0; i < count; i++)
        linears[i].grouped_weight = linears[i].grouped_bias = !strcmp(opt.to, "grouped");
    cuts = cuts_of(linears, count, &target.rank,
                   target.scheme->glu_known ? target.scheme->glu_block : target.glu_block);
    target.cuts = cuts;
    if (*opt.out || opt.dry_run) {
        if (gmm_ckpt_plan_create(&plan, &source, &target, linears, count, NULL, &report))
            die("%s: %s", opt.in, report.error.text);
        if (gmm_ckpt_verify(plan, NULL, 0, &report.error)) die("%s", report.error.text);
        if (!opt.quiet) print_cost(plan, &report);
        if (!opt.dry_run) convert(&in, plan);
    }
    gmm_ckpt_plan_destroy(plan);
    gmm_ckpt_linears_release(linears, NULL);
    free(cuts);
    free(list);
    close_input(&in);
    return 0;
}
