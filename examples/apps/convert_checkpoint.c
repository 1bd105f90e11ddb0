/* convert_checkpoint.c - converts expert weights from any layout into any other, in safetensors files of any size.
 * SPDX-License-Identifier: MIT
 *
 * Names, layouts and slices are gmm's checkpoint plans (gmm.h, section 13); this program adds the files: it lists the
 * tensors of the input, lets gmm plan, verify and cost the conversion, and applies the moves from file to file through
 * a scratch buffer of fixed size. No file has the output's name before it is complete. A run that was stopped
 * continues where it stopped: OUT.resume records the input, the bytes written of each file (FILE.partial), and the next
 * move.
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
#include "../common/checkpoint_keys.h"
#include "../common/files.h"
#include "../common/options.h"
#include "../common/program.h"
#include "../common/progress.h"
#include "../common/safetensors.h"

/* -------------------------------------------------------------------------------------------------- 1 Options --- */

enum { STATES = 16 };

static struct settings {
    const char *in, *out, *from, *to, *prefix, *ep, *etp, *gtp, *dtype, *bias_dtype, *extra, *states, *shard_size;
    int64_t in_glu_block, glu_block, in_ep, in_etp, in_gtp, experts, scratch, cursor_bytes;
    int64_t drop_wrappers, drop_extra_state, equal_scales, partial, dry_run, inspect, restart, quiet, help;
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
    {"equal-scales", OPTION_SWITCH, 0, &opt.equal_scales, "0", 0, 1, "",
     "scales that ETP ranks, or gate and up, have of one block each are equal: join them", 0},
    {"shard-size", OPTION_TEXT, 0, &opt.shard_size, "0", 0, 0, "BYTES", "of an output file, as 5G or 500M; 0 = one",
     0},
    {"scratch", OPTION_INTEGER, 0, &opt.scratch, "64", 1, 1 << 20, "", "MiB of memory to convert through", 0},
    {"cursor-bytes", OPTION_INTEGER, 0, &opt.cursor_bytes, "1000000000", 1, 9e18, "",
     "written between two notes of how far the run is", 0},
    {"partial", OPTION_SWITCH, 0, &opt.partial, "0", 0, 1, "",
     "go on without files, experts or layers that the input lacks", 0},
    {"dry-run", OPTION_SWITCH, 0, &opt.dry_run, "0", 0, 1, "", "plan and verify, print plan and cost, write nothing",
     0},
    {"inspect", OPTION_SWITCH, 0, &opt.inspect, "0", 0, 1, "", "print what the input holds; finds --from itself", 0},
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
    printf("\nindexed and grouped are megatron with weight0... and with one stacked weight; olmoe is qwen3-moe.\n"
           "Quantized experts keep their bytes, and their scales go with them: FP8 in blocks of 128x128, per row and\n"
           "per tensor, MXFP8, NVFP4, and gpt-oss's MXFP4. --dtype turns all but NVFP4 into 16 or 32 bits.\n");
}

/* The scheme of a name; "indexed" and "grouped" are one scheme with an option, which others lack. */
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

/* Reads RANK/SIZE and puts it down as files record it, without blanks and leading zeros. */
static void rank_of(const char *name, const char **text, int32_t *rank, int32_t *size) {
    char rest, *own = (char *)get(32); /* for the whole run, as the option's text was */
    int r, s;
    if (sscanf(*text, "%9d/%9d%c", &r, &s, &rest) != 2 || s < 1 || r < 0 || r >= s)
        die("--%s takes RANK/SIZE with 0 <= RANK < SIZE, not \"%s\"", name, *text);
    snprintf(own, 32, "%d/%d", r, s);
    *text = own;
    *rank = r;
    *size = s;
}

static int64_t bytes_of(const char *name, const char *text) {
    char *end = NULL;
    const double value = strtod(text, &end);
    const double unit = *end == 'G' ? 1e9 : *end == 'M' ? 1e6 : *end == 'K' ? 1e3 : 1;
    if (end == text || (unit > 1 && *++end) || *end || !(value >= 0) || value * unit > 9e18 ||
        (value > 0 && value * unit < 1))
        die("--%s takes a number of bytes, as 5G or 500M, not \"%s\"", name, text);
    return (int64_t)(value * unit);
}

/* ---------------------------------------------------------------------------------------------------- 2 Input --- */

/* Dtypes that gmm knows; tensors of others can only be copied. */
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

enum { LISTED = 100 }; /* longest list that is printed; further lines are only counted */

typedef struct input {
    st_set *sets;                /* one for each rank */
    gmm_ckpt_part *parts;
    gmm_ckpt_table **tables;
    const st_tensor **tensors;   /* by tag - 1 */
    int64_t tensor_count, bytes;
    int32_t count;
    gmm_ckpt_glu recorded;
    int gated;                   /* 1: an FC1 has gate and up rows, whose order the output records */
} input;

/* The pattern with {ep}, {etp}, {gtp} filled in. */
static char *path_of(const char *pattern, const gmm_ckpt_rank *r) {
    const struct { const char *name; int32_t rank; } fields[] = {
        {"{ep}", r->ep_rank}, {"{etp}", r->etp_rank}, {"{gtp}", r->gtp_rank}};
    const size_t capacity = strlen(pattern) + 64;
    char *path = (char *)get(capacity);
    size_t n = 0;
    while (*pattern && n + 16 < capacity) {
        int i;
        for (i = 0; i < 3; i++)
            if (!strncmp(pattern, fields[i].name, strlen(fields[i].name))) break;
        if (i == 3) {
            path[n++] = *pattern++;
            continue;
        }
        n += (size_t)snprintf(path + n, capacity - n, "%d", (int)fields[i].rank);
        pattern += strlen(fields[i].name);
    }
    return path;
}

/* Checks that the layout that a file records agrees with the command line. */
static void check_metadata(input *in, const st_file *file, const char *path, const gmm_ckpt_rank *r) {
    const struct { const char *key; int32_t rank, size; } ranks[] = {
        {"gmm.ep", r->ep_rank, r->ep_size}, {"gmm.etp", r->etp_rank, r->etp_size},
        {"gmm.gtp", r->gtp_rank, r->gtp_size}};
    const char *layout = st_metadata(file, "gmm.layout"), *block = st_metadata(file, "gmm.glu_block");
    char *end = NULL;
    if (layout && !scheme_of(layout)) die("%s: it records the layout \"%.60s\", which is unknown", path, layout);
    if (layout && !given(&opt.from)) opt.from = layout;
    if (layout && scheme_of(layout) != scheme_of(opt.from))
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

/* Ends the program if files of ranks are missing. */
static void check_ranks(const input *in) {
    int64_t missing = 0;
    for (int32_t p = 0; p < in->count && in->count > 1; p++) {
        char *path = path_of(opt.in, &in->parts[p].rank);
        if (access(path, F_OK) && errno == ENOENT) {
            if (!missing++) fprintf(stderr, "convert_checkpoint: %s lacks:\n", opt.in);
            if (missing <= LISTED) fprintf(stderr, "  file %s\n", path);
        }
        free(path);
    }
    if (missing) die("%lld of the %d files of ranks are missing", (long long)missing, (int)in->count);
}

static void read_part(input *in, int32_t p, const gmm_ckpt_rank *rank) {
    char *path = path_of(opt.in, rank);
    gmm_ckpt_report report;
    st_error error;
    if (!st_set_open_partial(&in->sets[p], path, &error)) die("%s", error.text);
    if (!in->sets[p].count) die("%s: none of the %lld files that it names is there", path,
                                (long long)in->sets[p].missing_count);
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
        in.parts[p].rank = r;
    }
    check_ranks(&in);
    for (int32_t p = 0; p < in.count; p++) read_part(&in, p, &in.parts[p].rank);
    return in;
}

/* Rebuilds the tables without the tensors of incomplete layers. */
static void remove_incomplete_layers(input *in, const key_inventory *found) {
    gmm_ckpt_report report;
    for (int32_t p = 0; p < in->count; p++) {
        int64_t count;
        const gmm_ckpt_tensor *t = gmm_ckpt_table_tensors(in->tables[p], &count);
        gmm_ckpt_table *table;
        int32_t storage;
        if (gmm_ckpt_table_create(&table, NULL, &report.error)) die("%s", report.error.text);
        for (int64_t f = 0; f < in->sets[p].count; f++)
            if (gmm_ckpt_table_add_storage(table, NULL, in->sets[p].files[f].data_bytes, &storage, &report.error))
                die("%s", report.error.text);
        for (int64_t i = 0; i < count; i++)
            if (!found->left_out[p][i] && gmm_ckpt_table_add(table, &t[i], &report)) die("%s", report.error.text);
        gmm_ckpt_table_destroy(in->tables[p]);
        in->parts[p].table = in->tables[p] = table;
    }
}

/* Lists what the input lacks. Without --partial that ends the program; with it, or if the input is only inspected,
   incomplete layers are left out. */
static void check_complete(input *in, const gmm_ckpt_source *source) {
    FILE *to = opt.partial || (opt.inspect && !*opt.out && !opt.dry_run) ? stdout : stderr;
    key_inventory found;
    int64_t files = 0, listed = 0;
    if (!key_inventory_of(&found, source, opt.experts)) die("out of memory");
    for (int32_t p = 0; p < in->count; p++) files += in->sets[p].missing_count;
    if (files + found.missing_count && !(opt.quiet && to == stdout)) {
        fprintf(to, "%s%s lacks:\n", to == stderr ? "convert_checkpoint: " : "", opt.in);
        for (int32_t p = 0; p < in->count; p++)
            for (int64_t f = 0; f < in->sets[p].missing_count && listed < LISTED; f++, listed++)
                fprintf(to, "  file %s\n", in->sets[p].missing[f]);
        for (int64_t i = 0; i < found.missing_count && listed < LISTED; i++, listed++)
            fprintf(to, "  %s\n", found.missing[i]);
        if (listed < files + found.missing_count)
            fprintf(to, "  and %lld more\n", (long long)(files + found.missing_count - listed));
        if (to == stdout && found.left_out_count)
            printf("left out: %lld tensors of %lld layers\n", (long long)found.left_out_count,
                   (long long)found.layers_left_out);
    }
    if (files + found.missing_count && to == stderr)
        die("the input is incomplete. --partial converts the layers that lack nothing%s",
            found.missing_count && !opt.experts ? "; --experts N states their number where routers have more rows"
                                                : "");
    if (found.left_out_count) remove_incomplete_layers(in, &found);
    key_inventory_free(&found);
}

/* The scheme with the most keys of the input, NULL if none has any; among equals, one that scans without error and
   finds gate rows, then the one with the fewest rows. `others` gets the names of those that fit as well. */
static const gmm_ckpt_scheme *find_scheme(gmm_ckpt_source *source, char *others, size_t capacity) {
    const gmm_ckpt_scheme *best = NULL, *scheme;
    int64_t best_score = 0;
    *others = 0;
    for (int32_t i = 0; (scheme = gmm_ckpt_scheme_at(i)) != NULL; i++) {
        gmm_ckpt_linear *linears = NULL;
        gmm_ckpt_report report;
        key_inventory found;
        int64_t score, count = 0;
        if (!strcmp(scheme->name, "module")) continue; /* it has no layer numbers */
        source->scheme = scheme;
        if (!key_inventory_of(&found, source, opt.experts)) die("out of memory");
        score = found.matched * 4;
        key_inventory_free(&found);
        if (score && !gmm_ckpt_scan(source, opt.experts, &linears, &count, NULL, &report))
            score += 2 + (count && linears[0].gated);
        gmm_ckpt_linears_release(linears, NULL);
        if (!score || score < best_score) continue;
        if (score > best_score) *others = 0;
        if (score == best_score) {
            const gmm_ckpt_scheme *more = scheme->count < best->count ? best : scheme;
            const size_t used = strlen(others);
            snprintf(others + used, capacity - used, "%s%s", used ? ", " : "", more->name);
            if (more == scheme) continue;
        }
        best = scheme;
        best_score = score;
    }
    source->scheme = best ? best : scheme_of(opt.from);
    return best;
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
    st_identity *identities;   /* of the files as OUT.resume records them */
    char **names;              /* of the files, without the folder */
    char **paths, **temporaries;
    int64_t count;
    st_tensor *tensors;        /* as the plan's targets */
    int64_t *owner;            /* the file of each */
    int64_t tensor_count;
    char *index;               /* NULL for one file */
    char *resume_path, *lock_path;
    char *made_of;             /* identity of the run: its plan, and the identities of the input's files */
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

static uint64_t hash_plan(const gmm_ckpt_plan *plan) {
    uint64_t h = HASH_BEGIN;
    int64_t n;
    const gmm_ckpt_move *moves = gmm_ckpt_plan_moves(plan, &n);
    const gmm_ckpt_tensor *t;
    h = hash_bytes(h, moves, (size_t)n * sizeof *moves);
    t = gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), &n);
    for (int64_t i = 0; i < n; i++) h = hash_bytes(h, t[i].name, strlen(t[i].name) + 1);
    return h;
}

static file_place place_of(const char *path) {
    file_place place;
    if (!file_place_of(&place, path)) die("out of memory");
    return place;
}

/* The first lines of OUT.resume. A run continues only if they agree, and at the end they must be unchanged. */
static char *describe_source(const input *in, const gmm_ckpt_plan *plan) {
    char *text = NULL;
    size_t size = 0;
    FILE *lines = open_memstream(&text, &size);
    if (!lines) die("out of memory");
    fprintf(lines, "gmm-convert 2\nplan %016llx\n", (unsigned long long)hash_plan(plan));
    for (int32_t p = 0; p < in->count; p++)
        for (int64_t f = 0; f < in->sets[p].count; f++) {
            file_place place = place_of(in->sets[p].paths[f]);
            st_identity is;
            st_error error;
            if (!st_identify(&in->sets[p].files[f], &is, &error)) die("%s: %s", in->sets[p].paths[f], error.text);
            fprintf(lines, "input %llu %lld %lld.%09lld %016llx %s\n", (unsigned long long)is.inode,
                    (long long)is.size, (long long)is.seconds, (long long)is.nanoseconds,
                    (unsigned long long)is.header, place.entry);
            file_place_free(&place);
        }
    if (fclose(lines)) die("out of memory");
    return text;
}

/* The next move of an earlier run of the same plan and input, and the identities of its files; -1 if there was none. */
static int64_t read_record(output *o) {
    FILE *file = fopen(o->resume_path, "r");
    const size_t size = strlen(o->made_of);
    char *head = (char *)get(size + 1);
    long long cursor = -1;
    int ok = file && fread(head, 1, size, file) == size && !strcmp(head, o->made_of);
    for (int64_t i = 0; ok && i < o->count; i++) {
        unsigned long long inode, header;
        long long bytes, seconds, nanoseconds;
        ok = fscanf(file, " output %llu %lld %lld.%lld %llx", &inode, &bytes, &seconds, &nanoseconds, &header) == 5;
        if (!ok) break;
        o->identities[i].inode = inode;
        o->identities[i].size = bytes;
        o->identities[i].seconds = seconds;
        o->identities[i].nanoseconds = nanoseconds;
        o->identities[i].header = header;
    }
    ok = ok && fscanf(file, " next move %lld", &cursor) == 1 && cursor >= 0;
    if (file) fclose(file);
    free(head);
    return ok ? cursor : -1;
}

/* Records the next move. Written data is flushed to the disk first, so that the record never claims more than the files
   hold. */
static int write_record(output *o, int64_t cursor, st_error *error) {
    char *temporary = format_path("%s.tmp", o->resume_path);
    FILE *file = NULL;
    int ok = 1;
    for (int64_t i = 0; ok && i < o->count; i++)
        ok = st_flush(&o->writers[i], error) && st_writer_identify(&o->writers[i], &o->identities[i], error);
    if (ok) {
        (void)unlink(temporary);
        file = fopen(temporary, "w");
        ok = file && fputs(o->made_of, file) >= 0;
        for (int64_t i = 0; ok && i < o->count; i++) {
            const st_identity *is = &o->identities[i];
            ok = fprintf(file, "output %llu %lld %lld.%09lld %016llx\n", (unsigned long long)is->inode,
                         (long long)is->size, (long long)is->seconds, (long long)is->nanoseconds,
                         (unsigned long long)is->header) > 0;
        }
        ok = ok && fprintf(file, "next move %lld\n", (long long)cursor) > 0 && !fflush(file) && !fsync(fileno(file));
        if (file) ok = !fclose(file) && ok;
        ok = ok && !rename(temporary, o->resume_path);
        if (!ok) snprintf(error->text, sizeof error->text, "cannot write %.500s: %s", o->resume_path, strerror(errno));
    }
    free(temporary);
    return ok;
}

/* Assigns the targets, in order, to files of at most `limit` bytes. */
static void lay_out(output *o, const input *in, const gmm_ckpt_plan *plan, int64_t limit) {
    const gmm_ckpt_tensor *t = gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), &o->tensor_count);
    const char *name = opt.out + folder_length(opt.out);
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
    o->identities = (st_identity *)get((size_t)o->count * sizeof *o->identities);
    for (int64_t i = 0; i < o->count; i++) o->writers[i].descriptor = -1;
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
    o->resume_path = format_path("%s.resume", opt.out);
    o->lock_path = format_path("%s.lock", opt.out);
}

static int64_t add_place(file_place *list, int64_t count, const char *path) {
    list[count] = place_of(path);
    return count + 1;
}

/* No path that the run may write or remove may be one that it reads. */
static void check_apart(const input *in, const output *o) {
    int64_t written = 4, read = 0, w = 0, r = 0;
    char *temporary = format_path("%s.tmp", o->resume_path);
    file_place *writes, *reads;
    written += 2 * o->count;
    for (int32_t p = 0; p < in->count; p++) read += 1 + in->sets[p].count + in->sets[p].missing_count;
    writes = (file_place *)get((size_t)written * sizeof *writes);
    reads = (file_place *)get((size_t)read * sizeof *reads);
    for (int64_t i = 0; i < o->count; i++) {
        w = add_place(writes, w, o->paths[i]);
        w = add_place(writes, w, o->temporaries[i]);
    }
    w = add_place(writes, w, o->resume_path);
    w = add_place(writes, w, temporary);
    w = add_place(writes, w, o->lock_path);
    if (o->index) w = add_place(writes, w, o->index);
    for (int32_t p = 0; p < in->count; p++) {
        char *path = path_of(opt.in, &in->parts[p].rank);
        r = add_place(reads, r, path); /* the index itself, if there is one */
        for (int64_t f = 0; f < in->sets[p].count; f++) r = add_place(reads, r, in->sets[p].paths[f]);
        for (int64_t f = 0; f < in->sets[p].missing_count; f++) r = add_place(reads, r, in->sets[p].missing[f]);
        free(path);
    }
    for (int64_t i = 0; i < w; i++)
        for (int64_t k = 0; k < r; k++)
            if (file_place_same(&writes[i], &reads[k]))
                die("%s: the output would replace the input: this run writes or removes that file, but reads it as %s",
                    writes[i].entry, reads[k].entry);
    for (int64_t i = 0; i < w; i++) file_place_free(&writes[i]);
    for (int64_t k = 0; k < r; k++) file_place_free(&reads[k]);
    free(writes);
    free(reads);
    free(temporary);
}

/* No file replaces a folder; without this the run would notice at its end. */
static void check_no_folder(const output *o) {
    for (int64_t i = 0; i <= o->count; i++) {
        const char *path = i < o->count ? o->paths[i] : o->index;
        struct stat about;
        if (path && !stat(path, &about) && S_ISDIR(about.st_mode)) die("%s is a folder", path);
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
        if (i == 1 ? in->gated : i == 0 || strcmp(own[i].value, "0/1")) pairs[(*count)++] = own[i];
    return pairs;
}

static void abandon_output(output *o) {
    for (int64_t i = 0; i < o->count; i++) st_abandon(&o->writers[i]);
    (void)unlink(o->resume_path);
}

/* Opens all files: new ones with cursor -1, else those of the run that stopped before that move. Returns 0, with
   nothing open, if one of those is missing: only files that the record identifies are accepted, and as finished only
   after the last move. */
static int open_output(output *o, const input *in, int64_t cursor, int64_t moves) {
    char text[1][32];
    int64_t count, first = 0;
    st_pair *pairs = metadata_of(in, text, &count);
    st_error error;
    int ok = 1;
    for (int64_t i = 0; i < o->count; i++) {
        st_resume resume = {o->temporaries[i], cursor >= 0 ? &o->identities[i] : NULL, cursor == moves};
        int64_t n = 0;
        while (first + n < o->tensor_count && o->owner[first + n] == i) n++;
        if (!st_create_resumable(&o->writers[i], o->paths[i], &resume, o->tensors + first, n, pairs, count, &error)) {
            for (int64_t k = 0; k < i; k++) st_abandon(&o->writers[k]);
            die("%s: %s", o->paths[i], error.text);
        }
        first += n;
        if (cursor >= 0 && !o->writers[i].resumed) {
            for (int64_t k = 0; k < i; k++) st_suspend(&o->writers[k]);
            st_abandon(&o->writers[i]);
            ok = 0;
            break;
        }
    }
    free(pairs);
    return ok;
}

/* Opens the output where an earlier run stopped, or a new one, and returns the first move. */
static int64_t begin_output(output *o, const input *in, const gmm_ckpt_plan *plan, int64_t moves) {
    int64_t cursor = -1;
    st_error error;
    o->made_of = describe_source(in, plan);
    if (!opt.restart) cursor = read_record(o);
    if (cursor > moves || (cursor >= 0 && !open_output(o, in, cursor, moves))) cursor = -1;
    if (cursor >= 0 && !opt.quiet)
        printf("going on after move %lld of %lld of an earlier run\n", (long long)cursor, (long long)moves);
    if (cursor >= 0) return cursor;
    (void)unlink(o->resume_path);
    (void)open_output(o, in, -1, moves);
    if (!write_record(o, 0, &error)) {
        abandon_output(o);
        die("%s: %s", opt.out, error.text);
    }
    return 0;
}

/* Renames the written files to their final names. If the program is killed at any moment, all files under final names
   are complete, and no index names files of an older output; the same command then finishes. */
static void finish_output(output *o, const input *in, const gmm_ckpt_plan *plan, int64_t moves) {
    char *now = describe_source(in, plan);
    st_error error;
    if (strcmp(now, o->made_of)) {
        abandon_output(o);
        die("%s: it changed while it was read: nothing is written", opt.in);
    }
    for (int64_t i = 0; i < o->count; i++)
        if (!st_flush(&o->writers[i], &error)) { /* a file that was not flushed must not be taken for finished later */
            abandon_output(o);
            die("cannot finish %s: %s", o->paths[i], error.text);
        }
    if (!write_record(o, moves, &error)) die("%s", error.text);
    if (o->index && unlink(o->index) && errno != ENOENT)
        die("cannot remove the older %s: %s", o->index, strerror(errno));
    if (o->index && !st_sync_folder(o->index, &error)) die("%s", error.text);
    for (int64_t i = 0; i < o->count; i++)
        if (!st_commit(&o->writers[i], &error)) die("%s", error.text);
    if (o->index && !st_write_index(o->index, (const char *const *)o->names, o->tensors, o->owner, o->tensor_count,
                                    &error))
        die("%s", error.text);
    (void)unlink(o->resume_path);
    free(now);
}

static void free_output(output *o) {
    for (int64_t i = 0; i < o->count; i++) {
        free(o->names[i]);
        free(o->paths[i]);
        free(o->temporaries[i]);
    }
    free(o->names);
    free(o->paths);
    free(o->temporaries);
    free(o->writers);
    free(o->identities);
    free(o->tensors);
    free(o->owner);
    free(o->index);
    free(o->resume_path);
    free(o->lock_path);
    free(o->made_of);
}

/* A dry run reports the path errors that a run would report. */
static void check_output(const input *in, const gmm_ckpt_plan *plan) {
    output o;
    if (!*opt.out) return;
    memset(&o, 0, sizeof o);
    lay_out(&o, in, plan, bytes_of("shard-size", opt.shard_size));
    check_apart(in, &o);
    check_no_folder(&o);
    free_output(&o);
}

static file_lock output_lock; /* of this process */

static void unlock_output(void) { file_lock_release(&output_lock); }

/* One run at a time writes an output. */
static void lock_output(const output *o) {
    file_error error;
    if (!file_lock_take(&output_lock, o->lock_path, &error)) die("%s", error.text);
    (void)atexit(unlock_output);
    if (!output_lock.held && !opt.quiet)
        printf("%s: this file system has no locks: no other run may write this output\n", o->lock_path);
}

/* -------------------------------------------------------------------------------------------------- 4 Reports --- */

enum { WIDEST = 80 }; /* characters of a pattern in a table */

static const char *size_text(double bytes, char *text, size_t capacity) {
    const char *const units[] = {"B", "KB", "MB", "GB", "TB", "PB"};
    int u = 0;
    for (; bytes >= 1000 && u < 5; u++) bytes /= 1000;
    snprintf(text, capacity, u ? "%.2f %s" : "%.0f %s", bytes, units[u]);
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

static void print_patterns(const char *const *names, int64_t count) {
    int64_t *pattern_of = (int64_t *)get((size_t)count * sizeof *pattern_of);
    key_patterns p;
    if (!key_patterns_of(&p, names, count, pattern_of)) die("out of memory");
    for (int64_t i = 0; i < p.count && i < LISTED; i++) printf("  %8lld  %.200s\n", (long long)p.names[i], p.texts[i]);
    if (p.count > LISTED) printf("  and %lld more patterns\n", (long long)(p.count - LISTED));
    key_patterns_free(&p);
    free(pattern_of);
}

static void inspect_files(const input *in) {
    char text[32];
    int64_t files = 0, i;
    for (int32_t p = 0; p < in->count; p++) files += in->sets[p].count;
    printf("%s: %lld tensors, %s in %lld file%s\n", opt.in, (long long)in->tensor_count,
           size_text((double)in->bytes, text, sizeof text), (long long)files, files == 1 ? "" : "s");
    for (i = 0; i < in->sets[0].files[0].metadata_count; i++)
        printf("  metadata %s = %s\n", in->sets[0].files[0].metadata[i].key, in->sets[0].files[0].metadata[i].value);
}

static void inspect_linears(const input *in, const gmm_ckpt_linear *l, int64_t linears, const char *others) {
    if (!linears) {
        const char **names = (const char **)get((size_t)in->tensor_count * sizeof *names);
        for (int64_t i = 0; i < in->tensor_count; i++) names[i] = in->tensors[i]->name;
        printf("no tensor is an expert's in %s. Keys by pattern (N: a number):\n",
               given(&opt.from) ? opt.from : "a known layout");
        print_patterns(names, in->tensor_count);
        free((void *)names);
        return;
    }
    printf("read as %s%s%s%s; gate and up rows: ", scheme_of(opt.from)->name, *others ? " (its keys fit " : "", others,
           *others ? " as well)" : "");
    if (in->recorded.known) printf("blocks of %d (0 = halves) are recorded\n", (int)in->recorded.block);
    else printf("%s\n", scheme_of(opt.from)->glu_known ? "as the layout says" : "not recorded");
    printf("linears: experts x out x in\n");
    for (int64_t i = 0; i < linears; i++) print_linear(&l[i]);
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

/* Moves from one pattern of sources to one pattern of targets, of one kind and dtype pair, and their totals. */
typedef struct move_group {
    int64_t from, to; /* patterns; from -1: zeros */
    int64_t target, bytes;
    const char *from_dtype, *to_dtype;
    int kind;
} move_group;

static int compare_move_groups(const void *a, const void *b) {
    const move_group *x = (const move_group *)a, *y = (const move_group *)b;
    int order;
    if (x->from != y->from) return x->from < y->from ? -1 : 1;
    if (x->to != y->to) return x->to < y->to ? -1 : 1;
    if (x->kind != y->kind) return x->kind < y->kind ? -1 : 1;
    if ((order = strcmp(x->from_dtype, y->from_dtype)) != 0) return order;
    if ((order = strcmp(x->to_dtype, y->to_dtype)) != 0) return order;
    return x->target < y->target ? -1 : x->target > y->target;
}

static int same_row(const move_group *a, const move_group *b) {
    move_group x = *a, y = *b;
    x.target = y.target = 0;
    return !compare_move_groups(&x, &y);
}

/* The moves in groups, sorted. from_of: source patterns by tag - 1; to_of: patterns of the targets. */
static move_group *move_groups_of(const input *in, const gmm_ckpt_plan *plan, const int64_t *from_of,
                                  const int64_t *to_of) {
    int64_t moves;
    const gmm_ckpt_tensor *targets = gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), NULL);
    const gmm_ckpt_move *m = gmm_ckpt_plan_moves(plan, &moves);
    move_group *list = (move_group *)get((size_t)moves * sizeof *list);
    for (int64_t i = 0; i < moves; i++) {
        const gmm_ckpt_tensor *d = &targets[m[i].dst];
        const int64_t tag = m[i].src < 0 ? 0 : gmm_ckpt_table_tensors(in->tables[m[i].part], NULL)[m[i].src].tag;
        list[i].from = tag ? from_of[tag - 1] : -1;
        list[i].to = to_of[m[i].dst];
        list[i].target = m[i].dst;
        list[i].bytes = bytes_of_moves(plan, i, i + 1);
        list[i].kind = (int)m[i].kind;
        list[i].from_dtype = tag ? in->tensors[tag - 1]->dtype : "";
        list[i].to_dtype = d->tag ? in->tensors[d->tag - 1]->dtype : dtype_out(d->dtype);
    }
    if (moves) qsort(list, (size_t)moves, sizeof *list, compare_move_groups);
    return list;
}

/* Prints the plan, one line for each group of moves. */
static void print_plan(const input *in, const gmm_ckpt_plan *plan) {
    static const char *const kinds[] = {"view", "copy", "convert", "dequantize", "zeros"};
    int64_t count, moves, wide[2] = {4, 2};
    const gmm_ckpt_tensor *targets = gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), &count);
    const char **from = (const char **)get((size_t)in->tensor_count * sizeof *from);
    const char **to = (const char **)get((size_t)count * sizeof *to);
    int64_t *from_of = (int64_t *)get((size_t)in->tensor_count * sizeof *from_of);
    int64_t *to_of = (int64_t *)get((size_t)count * sizeof *to_of);
    key_patterns p[2];
    move_group *list;
    (void)gmm_ckpt_plan_moves(plan, &moves);
    for (int64_t i = 0; i < in->tensor_count; i++) from[i] = in->tensors[i]->name;
    for (int64_t i = 0; i < count; i++) to[i] = targets[i].name;
    if (!key_patterns_of(&p[0], from, in->tensor_count, from_of) || !key_patterns_of(&p[1], to, count, to_of))
        die("out of memory");
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < p[k].count; i++) {
            const int64_t n = (int64_t)strlen(p[k].texts[i]);
            if (n > wide[k]) wide[k] = n < WIDEST ? n : WIDEST;
        }
    list = move_groups_of(in, plan, from_of, to_of);
    printf("%-*s  %-*s  %7s  %-10s  %-18s %10s\n", (int)wide[0], "from (N: a number)", (int)wide[1], "to", "tensors",
           "how", "dtype", "bytes");
    for (int64_t i = 0, end; i < moves; i = end) {
        int64_t tensors = 0, bytes = 0;
        char dtype[40], size[32];
        for (end = i; end < moves && same_row(&list[i], &list[end]); end++) {
            tensors += end == i || list[end].target != list[end - 1].target;
            bytes += list[end].bytes;
        }
        snprintf(dtype, sizeof dtype, "%s%s%s", list[i].from_dtype,
                 strcmp(list[i].from_dtype, list[i].to_dtype) && *list[i].from_dtype ? " to " : "",
                 strcmp(list[i].from_dtype, list[i].to_dtype) ? list[i].to_dtype : "");
        printf("%-*.*s  %-*.*s  %7lld  %-10s  %-18s %10s\n", (int)wide[0], WIDEST,
               list[i].from < 0 ? "" : p[0].texts[list[i].from], (int)wide[1], WIDEST, p[1].texts[list[i].to],
               (long long)tensors, kinds[list[i].kind], dtype, size_text((double)bytes, size, sizeof size));
    }
    key_patterns_free(&p[0]);
    key_patterns_free(&p[1]);
    free(list);
    free((void *)from);
    free((void *)to);
    free(from_of);
    free(to_of);
}

/* Prints the keys that are copied unchanged, and those that are dropped. */
static void print_kept(const gmm_ckpt_plan *plan, const gmm_ckpt_report *report) {
    int64_t count, kept = 0;
    const gmm_ckpt_tensor *t = gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), &count);
    const char **names = (const char **)get((size_t)count * sizeof *names);
    for (int64_t i = 0; i < count; i++)
        if (t[i].tag) names[kept++] = t[i].name;
    if (kept) printf("passed through unrenamed: %lld of the %lld tensors that come out, by pattern (N: a number)\n",
                     (long long)kept, (long long)count);
    print_patterns(names, kept);
    if (report->dropped) printf("dropped: %lld tensors\n", (long long)report->dropped);
    if (report->merged) printf("merged: %lld tensors that an earlier file has too\n", (long long)report->merged);
    free((void *)names);
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

static void convert(const input *in, const gmm_ckpt_plan *plan) {
    gmm_ckpt_cost cost = GMM_ZERO;
    gmm_ckpt_run run = GMM_ZERO;
    gmm_error error;
    output o;
    transfer t;
    int64_t cursor, moves;
    char text[32], speed[32];
    double seconds;
    memset(&o, 0, sizeof o);
    memset(&t, 0, sizeof t);
    if (gmm_ckpt_cost_of(plan, &cost, &error)) die("%s", error.text);
    (void)gmm_ckpt_plan_moves(plan, &moves);
    lay_out(&o, in, plan, bytes_of("shard-size", opt.shard_size));
    check_apart(in, &o);
    check_no_folder(&o);
    lock_output(&o);
    cursor = begin_output(&o, in, plan, moves);
    run.scratch_bytes = (size_t)opt.scratch << 20;
    if (run.scratch_bytes < (size_t)cost.scratch_min) run.scratch_bytes = (size_t)cost.scratch_min;
    run.scratch = malloc(run.scratch_bytes);
    if (!run.scratch) die("out of memory");
    t.in = in;
    t.out = &o;
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
            st_error failed = t.error;
            const int kept = write_record(&o, cursor, &t.error);
            progress_clear(&t.bar);
            die("%s: %s (%s)\n%s", t.where ? t.where : opt.in, failed.text, error.text,
                kept ? "what was done is kept: the same command goes on from there" : t.error.text);
        }
        if (cursor < moves && !write_record(&o, cursor, &t.error)) {
            progress_clear(&t.bar);
            die("%s: %s", opt.out, t.error.text);
        }
    }
    progress_clear(&t.bar);
    finish_output(&o, in, plan, moves);
    seconds = progress_seconds() - t.bar.began;
    if (!opt.quiet)
        printf("%s: %s in %.1f s, %s/s\n", o.index ? o.index : opt.out, size_text((double)t.written, text, sizeof text),
               seconds, size_text(seconds > 0 ? (double)(t.written - t.bar.first) / seconds : 0, speed, sizeof speed));
    unlock_output();
    free_output(&o);
    free(run.scratch);
}

/* ----------------------------------------------------------------------------------------------------- 6 main --- */

/* The rows of every linear that the rank's GTP shard holds; NULL without generalized tensor parallelism. */
static gmm_ckpt_cut *cuts_of(const gmm_ckpt_linear *l, int64_t n, const gmm_ckpt_rank *rank, int32_t block) {
    gmm_ckpt_cut *cuts;
    gmm_error error;
    if (rank->gtp_size == 1) return NULL;
    cuts = (gmm_ckpt_cut *)get((size_t)n * sizeof *cuts);
    for (int64_t i = 0; i < n; i++) {
        const int64_t halves[2] = {l[i].out / 2, l[i].out / 2};
        const int fc1 = l[i].slot == GMM_CKPT_FC1;
        gmm_shard shard = GMM_ZERO;
        gmm_shard_plan plan = GMM_ZERO;
        if (!fc1 && l[i].slot != GMM_CKPT_FC2) continue;
        if (!strcmp(opt.dtype, "keep") && gmm_gtp_unit(l[i].scaling)) shard.scaling = l[i].scaling;
        shard.dtype = !shard.scaling ? GMM_BF16 : shard.scaling == GMM_SCALING_NV16 ? GMM_E2M1 : GMM_E4M3;
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
    char others[256] = "";
    static const char *const wrappers[] = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"};
    program_name = "convert_checkpoint";
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
    rank_of("ep", &opt.ep, &target.rank.ep_rank, &target.rank.ep_size);
    rank_of("etp", &opt.etp, &target.rank.etp_rank, &target.rank.etp_size);
    rank_of("gtp", &opt.gtp, &target.rank.gtp_rank, &target.rank.gtp_size);
    (void)bytes_of("shard-size", opt.shard_size);
    if (opt.in_ep * opt.in_etp * opt.in_gtp > 65536) die("--in-ep, --in-etp, --in-gtp: more than 65536 ranks");
    /* every rank would read the same file */
    if (opt.in_ep > 1 && !strstr(opt.in, "{ep}")) die("--in lacks {ep}, which --in-ep counts");
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
    source.equal_scales = (int32_t)opt.equal_scales;
    /* check_complete has listed what is missing; a plan is not needed if the input is only inspected */
    source.skip_missing = opt.partial || (opt.inspect && !*opt.out && !opt.dry_run);
    if (opt.inspect) inspect_files(&in);
    if (opt.inspect && !given(&opt.from) && !st_metadata(&in.sets[0].files[0], "gmm.layout") &&
        find_scheme(&source, others, sizeof others))
        opt.from = source.scheme->name;
    check_complete(&in, &source);
    if (gmm_ckpt_scan(&source, opt.experts, &linears, &count, NULL, &report)) die("%s: %s", opt.in, report.error.text);
    if (opt.inspect) inspect_linears(&in, linears, count, others);
    if (!count && (*opt.out || opt.dry_run)) {
        const gmm_ckpt_scheme *fits = find_scheme(&source, others, sizeof others);
        die("%s: no tensor of it is an expert's in the layout %s%s%s", opt.in, opt.from,
            fits ? "; its keys fit --from " : "", fits ? fits->name : "");
    }

    target.scheme = scheme_of(opt.to);
    target.glu_block = (int32_t)opt.glu_block;
    target.dtype = dtype_of(opt.dtype);
    target.bias_dtype = dtype_of(opt.bias_dtype);
    target.drop_wrappers = (int32_t)opt.drop_wrappers;
    for (int64_t i = 0; i < count; i++) {
        linears[i].grouped_weight = linears[i].grouped_bias = !strcmp(opt.to, "grouped");
        in.gated |= linears[i].slot == GMM_CKPT_FC1 && linears[i].gated;
    }
    cuts = cuts_of(linears, count, &target.rank,
                   target.scheme->glu_known ? target.scheme->glu_block : target.glu_block);
    target.cuts = cuts;
    if (*opt.out || opt.dry_run) {
        if (gmm_ckpt_plan_create(&plan, &source, &target, linears, count, NULL, &report))
            die("%s: %s", opt.in, report.error.text);
        if (gmm_ckpt_verify(plan, NULL, 0, &report.error)) die("%s", report.error.text);
        if (!opt.quiet && opt.dry_run) print_plan(&in, plan);
        if (!opt.quiet) print_kept(plan, &report);
        if (!opt.quiet) print_cost(plan, &report);
        if (opt.dry_run) check_output(&in, plan);
        else convert(&in, plan);
    }
    gmm_ckpt_plan_destroy(plan);
    gmm_ckpt_linears_release(linears, NULL);
    free(cuts);
    free(list);
    close_input(&in);
    return 0;
}
