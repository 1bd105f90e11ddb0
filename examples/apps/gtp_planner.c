/* gtp_planner.c - what sharding the experts of a model over 1, 2, 4, ... GPUs costs and saves.
 * SPDX-License-Identifier: MIT
 *
 * For every number of GPUs g that share an expert's weights: the memory that one of them needs, how long gathers and
 * reductions take, which of them hide behind the GEMMs, and what stays exposed of a micro-batch. Give it rates that you
 * have measured; the defaults are plain assumptions for H200s.
 *
 *     gtp_planner --help
 */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gmm_gtp.h"
#include "../common/options.h"
#include "../common/svg.h"

static void die(const char *format, ...) {
    va_list list;
    fputs("gtp_planner: ", stderr);
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    exit(1);
}

static struct settings {
    int64_t hidden, ffn, experts, layers, tokens, gated, gpus, node;
    int64_t prefetch, block, wrap, slots, optimizer_ranks, help;
    double gemm, link, network, latency, memory;
    const char *format, *wire, *svg;
} opt;

static option options[] = {
    {"hidden", OPTION_INTEGER, 0, &opt.hidden, "7168", 1, 1e6, "", "width of the model", 0},
    {"ffn", OPTION_INTEGER, 0, &opt.ffn, "2048", 1, 1e6, "", "width inside an expert", 0},
    {"experts", OPTION_INTEGER, 0, &opt.experts, "8", 1, 1e5, "", "experts of a layer on a GPU, gathered together", 0},
    {"layers", OPTION_INTEGER, 0, &opt.layers, "58", 1, 2048, "", "mixture-of-experts layers on a GPU", 0},
    {"tokens", OPTION_INTEGER, 0, &opt.tokens, "32768", 0, 1e9, "", "tokens of a layer's experts, all together", 0},
    {"gated", OPTION_INTEGER, 0, &opt.gated, "1", 0, 1, "", "1: FC1 holds gate and up", 0},
    {"gpus", OPTION_INTEGER, 0, &opt.gpus, "64", 1, 65536, "", "the most that share a weight; powers of two", 0},
    {"node", OPTION_INTEGER, 0, &opt.node, "8", 1, 65536, "", "GPUs of a node: up to as many, --link counts", 0},
    {"format", OPTION_CHOICE, 0, &opt.format, "bf16", 0, 0, "bf16|fp8|fp8-block|mxfp8|nvfp4", "of weights", 0},
    {"wire", OPTION_CHOICE, 0, &opt.wire, "bf16", 0, 0, "bf16|f32", "of reduced gradients", 0},
    {"prefetch", OPTION_INTEGER, 0, &opt.prefetch, "1", 0, 3, "", "gathered ahead; FC1 and FC2 are one each", 0},
    {"block", OPTION_SWITCH, 0, &opt.block, "0", 0, 1, "", "FC1 and FC2 of a layer are gathered together", 0},
    {"wrap", OPTION_SWITCH, 0, &opt.wrap, "0", 0, 1, "", "the first gather hides behind the micro-batch before", 0},
    {"wgrad-slots", OPTION_INTEGER, 0, &opt.slots, "2", 1, 16, "", "gradient buffers of each shape", 0},
    {"optimizer-ranks", OPTION_INTEGER, 0, &opt.optimizer_ranks, "1", 1, 1e6, "",
     "that share a shard's moments and fp32 copy", 0},
    {"gemm", OPTION_REAL, 0, &opt.gemm, "600", 1e-3, 1e6, "", "TFLOP/s that the expert GEMMs reach", 0},
    {"link", OPTION_REAL, 0, &opt.link, "340", 1e-3, 1e6, "", "GB/s of a GPU in a collective within a node", 0},
    {"network", OPTION_REAL, 0, &opt.network, "45", 1e-3, 1e6, "", "GB/s of a GPU in a collective across nodes", 0},
    {"latency", OPTION_REAL, 0, &opt.latency, "15", 0, 1e6, "", "microseconds of a collective", 0},
    {"memory", OPTION_REAL, 0, &opt.memory, "4000", 0, 1e6, "", "GB/s of the sums into main_grad; 0 = free", 0},
    {"svg", OPTION_TEXT, 0, &opt.svg, "build/gtp_planner.svg", 0, 0, "", "picture of the same; empty = none", 0},
    {"help", OPTION_SWITCH, 0, &opt.help, "0", 0, 1, "", "this text", 0},
};
enum { OPTIONS = sizeof options / sizeof options[0], ROWS = 18 };

static const struct format { const char *name; gmm_dtype dtype; gmm_scaling scaling; } formats[] = {
    {"bf16", GMM_BF16, GMM_SCALING_NONE}, {"fp8", GMM_E4M3, GMM_SCALING_TENSOR},
    {"fp8-block", GMM_E4M3, GMM_SCALING_128X128}, {"mxfp8", GMM_E4M3, GMM_SCALING_MX32},
    {"nvfp4", GMM_E2M1, GMM_SCALING_NV16}};

/* Results for one number of GPUs. */
typedef struct estimate {
    int gpus;
    gmm_gtp_memory memory;
    gmm_gtp_forecast step;
    gmm_gtp_stage fc[2]; /* of a middle layer */
} estimate;

static estimate estimate_of(int gpus) {
    const struct format *f = formats;
    const int64_t rows[2] = {opt.ffn * (1 + opt.gated), opt.hidden}, cols[2] = {opt.hidden, opt.ffn};
    const int n = (int)opt.layers * 2;
    gmm_gtp_stage *stages = (gmm_gtp_stage *)calloc((size_t)n, sizeof *stages);
    gmm_shard shards[2];
    gmm_error error;
    estimate o;
    if (!stages) die("out of memory");
    while (strcmp(f->name, opt.format)) f++;
    memset(&o, 0, sizeof o);
    memset(shards, 0, sizeof shards);
    o.gpus = gpus;
    for (int k = 0; k < 2; k++) {
        gmm_gtp_use use = GMM_ZERO;
        shards[k].dtype = f->dtype;
        shards[k].scaling = f->scaling;
        shards[k].rows = rows[k];
        shards[k].cols = cols[k];
        shards[k].gtp_size = gpus;
        use.bundle = (int32_t)opt.experts;
        use.shard = &shards[k];
        use.layers = opt.layers;
        use.gather_slots = (int32_t)(opt.block ? 2 : (opt.prefetch + 2) / 2);
        use.wgrad_slots = (int32_t)opt.slots;
        use.main_grad = GMM_F32;
        use.wire = !strcmp(opt.wire, "f32") ? GMM_F32 : GMM_BF16;
        use.all_to_all = use.wire == GMM_BF16 && gpus > 2;
        use.reduce_slots = use.all_to_all;
        use.optimizer_ranks = (int32_t)opt.optimizer_ranks;
        if (gmm_gtp_memory_add(&use, &o.memory, &error)) die("%s", error.text);
        o.step.wire = use.wire;
    }
    for (int i = 0; i < n; i++) {
        stages[i].bundle = (int32_t)opt.experts;
        stages[i].shard = &shards[i % 2];
        stages[i].tokens = (double)opt.tokens;
    }
    o.step.stages = n;
    o.step.gemm_rate = opt.gemm * 1e12;
    o.step.link_rate = (gpus <= opt.node ? opt.link : opt.network) * 1e9;
    o.step.latency = opt.latency * 1e-6;
    o.step.memory_rate = opt.memory * 1e9;
    o.step.prefetch = (int32_t)(opt.block ? 3 : opt.prefetch);
    o.step.prefetch = o.step.prefetch < n ? o.step.prefetch : n;
    o.step.wgrad_slots = (int32_t)opt.slots * 2; /* slots for both shapes */
    o.step.wrap = (int32_t)opt.wrap;
    if (gmm_gtp_foresee(&o.step, stages, &error)) die("%s", error.text);
    o.fc[0] = stages[n / 2 - n / 2 % 2];
    o.fc[1] = stages[n / 2 - n / 2 % 2 + 1];
    free(stages);
    return o;
}

static const char *hides(double exposed, double whole) {
    return whole == 0 ? "-" : exposed <= 1e-3 * whole ? "hidden" : exposed >= 0.999 * whole ? "exposed" : "partly";
}

/* Legends of the table columns. */
typedef struct legend { const char *column, *meaning; } legend;
static const legend memory_legend[] = {
    {"weights", "the shards of the weights that this GPU holds"},
    {"gradient", "main_grad of the shards, in fp32"},
    {"moments", "what AdamW keeps of the shards: its first and second moment (running means of the gradient and"},
    {"", "of its square) and an fp32 copy of the weights, 12 bytes a weight over --optimizer-ranks"},
    {"gathered", "whole weights of the layers under way, and where their parts arrive"},
    {"wgrad", "whole gradients before their reduction"},
    {"received", "what reductions receive from the other GPUs"},
};
static const legend layer_legend[] = {
    {"GEMM", "of a linear, forward"},
    {"gather", "of all shards of its weights, on the links alone"},
    {"forward,", "hidden: the gather is done before the GEMMs of this pass need it; exposed: they wait for all of"},
    {"backward", "it; partly: for a part of it; -: nothing is gathered"},
};
static const legend step_legend[] = {
    {"compute", "all GEMMs, forward and backward"},
    {"gathers", "on the links, forward and backward; exposed: what the GEMMs wait for of it"},
    {"reduce", "of gradients, on the links; exposed: what the GEMMs and the end of the micro-batch wait for of it"},
    {"step", "compute and all that is exposed; compute %: the share of the GEMMs"},
};

static void print_legend(const legend *list, size_t count) {
    for (size_t i = 0; i < count; i++) printf("%9s  %s\n", list[i].column, list[i].meaning);
}

static void print_table(const estimate *o, int count) {
    const double gb = 1e-9, us = 1e6, ms = 1e3;
    printf("%lld layers of %lld experts, FC1 %lld x %lld, FC2 %lld x %lld, %s; %lld tokens a layer\n",
           (long long)opt.layers, (long long)opt.experts, (long long)(opt.ffn * (1 + opt.gated)), (long long)opt.hidden,
           (long long)opt.hidden, (long long)opt.ffn, opt.format, (long long)opt.tokens);
    printf("GEMMs at %g TFLOP/s, %g GB/s in a node of %lld and %g GB/s across, %g us, gradients in %s, %lld ahead%s\n"
           "\n", opt.gemm, opt.link, (long long)opt.node, opt.network, opt.latency, opt.wire,
           (long long)(opt.block ? 3 : opt.prefetch), opt.block ? " (a block)" : "");
    printf("Memory of a GPU in GB\n%6s %9s %9s %9s %9s %9s %9s %9s\n", "GPUs", "weights", "gradient", "moments",
           "gathered", "wgrad", "received", "total");
    for (int i = 0; i < count; i++) {
        const gmm_gtp_memory *m = &o[i].memory;
        printf("%6d %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f\n", o[i].gpus, gb * (double)m->weights,
               gb * (double)m->main_grads, gb * (double)m->optimizer, gb * (double)(m->gather + m->stage),
               gb * (double)m->wgrad, gb * (double)m->reduce, gb * (double)m->total);
    }
    print_legend(memory_legend, sizeof memory_legend / sizeof memory_legend[0]);
    printf("\nA layer in the middle, in us: alone, and what the compute waits for it\n");
    printf("%6s %9s %9s %9s %9s %9s %9s %9s %9s\n", "GPUs", "FC1 GEMM", "gather", "forward", "backward",
           "FC2 GEMM", "gather", "forward", "backward");
    for (int i = 0; i < count; i++) {
        const gmm_gtp_stage *a = &o[i].fc[0], *b = &o[i].fc[1];
        printf("%6d %9.1f %9.1f %9s %9s %9.1f %9.1f %9s %9s\n", o[i].gpus, us * a->forward, us * a->gather,
               hides(a->exposed_forward, a->gather), hides(a->exposed_backward, a->gather), us * b->forward,
               us * b->gather, hides(b->exposed_forward, b->gather), hides(b->exposed_backward, b->gather));
    }
    print_legend(layer_legend, sizeof layer_legend / sizeof layer_legend[0]);
    printf("\nA micro-batch in ms\n%6s %9s %9s %9s %9s %9s %9s %9s\n", "GPUs", "compute", "gathers", "exposed",
           "reduce", "exposed", "step", "compute %");
    for (int i = 0; i < count; i++) {
        const gmm_gtp_forecast *f = &o[i].step;
        printf("%6d %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f %9.1f\n", o[i].gpus, ms * f->compute, ms * f->gather,
               ms * f->exposed_gather, ms * f->reduce, ms * f->exposed_reduce, ms * f->step,
               f->step > 0 ? 100 * f->compute / f->step : 0.0);
    }
    print_legend(step_legend, sizeof step_legend / sizeof step_legend[0]);
}

static void write_svg(const estimate *o, int count, const char *path) {
    double x[ROWS], compute[ROWS], gather[ROWS], step[ROWS], total[ROWS], buffers[ROWS], shards[ROWS];
    svg_box times = {0, 0, 760, 360}, memory = {0, 360, 760, 360};
    const svg_series lines[] = {{"GEMMs", "#4477aa", 0, count, x, compute},
                                {"and exposed gathers", "#ccbb44", 0, count, x, gather},
                                {"and exposed reductions", "#ee6677", 0, count, x, step}};
    const svg_series bytes[] = {{"shards: weights, gradients, moments", "#4477aa", 0, count, x, shards},
                                {"buffers: gathered, wgrad, received", "#ccbb44", 0, count, x, buffers},
                                {"total", "#ee6677", 1, count, x, total}};
    FILE *out = fopen(path, "w");
    if (!out) die("cannot write %s: %s", path, strerror(errno));
    for (int i = 0; i < count; i++) {
        const gmm_gtp_memory *m = &o[i].memory;
        x[i] = log2(o[i].gpus);
        compute[i] = 1e3 * o[i].step.compute;
        gather[i] = compute[i] + 1e3 * o[i].step.exposed_gather;
        step[i] = 1e3 * o[i].step.step;
        shards[i] = 1e-9 * (double)(m->weights + m->main_grads + m->optimizer);
        buffers[i] = 1e-9 * (double)(m->gather + m->stage + m->wgrad + m->reduce);
        total[i] = 1e-9 * (double)m->total;
    }
    svg_begin(out, 760, 720);
    svg_lines(out, times, "A micro-batch", "log2 of the GPUs that share a weight", "ms", lines, 3);
    svg_lines(out, memory, "Memory of a GPU", "log2 of the GPUs that share a weight", "GB", bytes, 3);
    svg_end(out);
    if (fclose(out)) die("cannot write %s: %s", path, strerror(errno));
    printf("\npicture: %s\n", path);
}

int main(int argc, char **argv) {
    static estimate rows[ROWS];
    option_error error;
    int count = 0;
    if (!options_parse(options, OPTIONS, argc, argv, &error)) die("%s", error.text);
    if (opt.help) {
        printf("usage: gtp_planner [options]\nMemory of expert weights sharded over GPUs, and what stays exposed.\n\n");
        options_print(options, OPTIONS);
        return 0;
    }
    for (int64_t g = 1; g <= opt.gpus && count < ROWS; g *= 2) rows[count++] = estimate_of((int)g);
    print_table(rows, count);
    if (*opt.svg && count > 1) write_svg(rows, count, opt.svg);
    return 0;
}
