/* gtp_planner.c - what sharding the experts of a model over 1, 2, 4, ... GPUs costs and saves.
 * SPDX-License-Identifier: MIT
 *
 * For every number of GPUs g that share an expert's weights: the memory that one of them needs, with the activations of
 * each save policy; the bytes that it receives, beside those of the all-to-alls of expert parallelism; how long gathers
 * and reductions take, which of them hide behind the GEMMs, and what stays exposed of a micro-batch. Then a verdict:
 * whether it fits, and what to change. Give it rates that you have measured; the defaults are plain assumptions for
 * H200s.
 *
 *     gtp_planner --help
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gmm.h"
#include "gmm_gtp.h"
#include "../common/files.h"
#include "../common/options.h"
#include "../common/program.h"
#include "../common/svg.h"

static struct settings {
    int64_t hidden, ffn, experts, layers, tokens, gated, gpus, node;
    int64_t prefetch, together, wrap, slots, optimizer_ranks, topk, ep, recompute, in_flight, help;
    double gemm, link, network, latency, memory, capacity, other;
    const char *format, *wire, *save_policy, *svg;
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
    {"together", OPTION_INTEGER, 0, &opt.together, "1", 1, 8, "", "gathered by one collective; 2: FC1 with its FC2", 0},
    {"wrap", OPTION_SWITCH, 0, &opt.wrap, "0", 0, 1, "", "the first gather hides behind the micro-batch before", 0},
    {"wgrad-slots", OPTION_INTEGER, 0, &opt.slots, "2", 1, 16, "", "gradient buffers of each shape", 0},
    {"optimizer-ranks", OPTION_INTEGER, 0, &opt.optimizer_ranks, "1", 1, 1e6, "",
     "that share a shard's moments and fp32 copy", 0},
    {"save-policy", OPTION_CHOICE, 0, &opt.save_policy, "preact", 0, 0,
     "preact|act|nothing|quantized|preact-e4m3|quantized-e4m3", "what forward keeps for backward", 0},
    {"recompute", OPTION_SWITCH, 0, &opt.recompute, "0", 0, 1, "", "layers keep their input, and run again", 0},
    {"in-flight", OPTION_INTEGER, 0, &opt.in_flight, "1", 1, 4096, "", "micro-batches between forward and backward", 0},
    {"topk", OPTION_INTEGER, 0, &opt.topk, "8", 1, 4096, "", "experts of a token; --tokens counts it as often", 0},
    {"ep", OPTION_INTEGER, 0, &opt.ep, "32", 1, 1e6, "", "GPUs that divide the experts (expert parallelism)", 0},
    {"capacity", OPTION_REAL, 0, &opt.capacity, "141", 0, 1e6, "", "GB of a GPU's memory", 0},
    {"other", OPTION_REAL, 0, &opt.other, "20", 0, 1e6, "", "GB of all but the experts: attention, its states", 0},
    {"gemm", OPTION_REAL, 0, &opt.gemm, "600", 1e-3, 1e6, "", "TFLOP/s that the expert GEMMs reach", 0},
    {"link", OPTION_REAL, 0, &opt.link, "340", 1e-3, 1e6, "", "GB/s of a GPU in a collective within a node", 0},
    {"network", OPTION_REAL, 0, &opt.network, "45", 1e-3, 1e6, "", "GB/s of a GPU in a collective across nodes", 0},
    {"latency", OPTION_REAL, 0, &opt.latency, "15", 0, 1e6, "", "microseconds of a collective", 0},
    {"memory", OPTION_REAL, 0, &opt.memory, "4000", 0, 1e6, "", "GB/s of the sums into main_grad; 0 = free", 0},
    {"svg", OPTION_TEXT, 0, &opt.svg, "build/gtp_planner.svg", 0, 0, "", "picture of the same; empty = none", 0},
    {"help", OPTION_SWITCH, 0, &opt.help, "0", 0, 1, "", "this text", 0},
};
enum { OPTIONS = sizeof options / sizeof options[0], ROWS = 18 };

static const struct format { const char *name; gmm_dtype dtype; gmm_scaling scaling; gmm_recipe_kind recipe; }
formats[] = {
    {"bf16", GMM_BF16, GMM_SCALING_NONE, GMM_RECIPE_NONE},
    {"fp8", GMM_E4M3, GMM_SCALING_TENSOR, GMM_RECIPE_FP8_CURRENT},
    {"fp8-block", GMM_E4M3, GMM_SCALING_128X128, GMM_RECIPE_FP8_BLOCK},
    {"mxfp8", GMM_E4M3, GMM_SCALING_MX32, GMM_RECIPE_MXFP8},
    {"nvfp4", GMM_E2M1, GMM_SCALING_NV16, GMM_RECIPE_NVFP4}};

static const struct format *format_of(const char *name) {
    const struct format *f = formats;
    while (strcmp(f->name, name)) f++; /* options.c has checked it */
    return f;
}

static const struct policy { const char *name; gmm_save save; int copies; } policies[] = {
    {"preact", GMM_SAVE_PREACT, 0}, {"act", GMM_SAVE_PREACT_AND_ACT, 0}, {"nothing", GMM_SAVE_NOTHING, 0},
    {"quantized", GMM_SAVE_QUANTIZED, 1}, {"preact-e4m3", GMM_SAVE_PREACT_E4M3, 0},
    {"quantized-e4m3", GMM_SAVE_QUANTIZED_E4M3, 1}};
enum { POLICIES = sizeof policies / sizeof policies[0] };

static const struct policy *policy_of(const char *name) {
    const struct policy *p = policies;
    while (strcmp(p->name, name)) p++;
    return p;
}

/* Bytes of activations on a GPU. */
typedef struct activations {
    int possible;     /* 0: the format's recipe has no such copies */
    double layer;     /* what one layer keeps from forward to backward */
    double input;     /* what it keeps if it runs again */
    double under_way; /* rows and workspace of the layer that runs */
    double kept, recomputed; /* all layers and the one under way: without and with recomputation */
} activations;

/* gmm counts what it saves. Backward reads besides, of every row, the row of x where gmm has saved no copy of it, the
   probability and both directions of the permutation (4 bytes each). A layer that runs again keeps its input before
   tokens are permuted, topk times smaller (activation recomputation: Chen et al., arXiv:1604.06174; Korthikanti et al.,
   arXiv:2205.05198), and all of a layer is there while its backward runs. Rows under way: x, y, dx and dy. */
static activations activations_of(const struct policy *policy) {
    static gmm_context *ctx;
    const gmm_config config = {.engine = GMM_ENGINE_CPU, .space = GMM_SPACE_CPU, .threads = 1};
    const struct format *f = format_of(opt.format);
    const gmm_recipe recipe = gmm_recipe_of(f->recipe);
    const double row = 2.0 * (double)opt.hidden, rows = (double)opt.tokens;
    int32_t splits = 0;
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config mlp_config = GMM_ZERO;
    gmm_mlp_quant quant = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_info fwd = GMM_ZERO, bwd = GMM_ZERO;
    gmm_mat mat = gmm_mat_packed(GMM_BF16, NULL);
    gmm_grad grad = GMM_ZERO;
    gmm_error error;
    activations a;
    memset(&a, 0, sizeof a);
    if (policy->copies && f->recipe == GMM_RECIPE_NONE) return a;
    if (!ctx && gmm_create(&ctx, &config, &error)) die("%s", error.text);
    groups.count = (int32_t)opt.experts;
    groups.capacity = opt.tokens;
    groups.splits = &splits; /* a query does not read it */
    groups.dtype = GMM_I32;
    mlp_config.hidden = opt.hidden;
    mlp_config.ffn = opt.ffn;
    mlp_config.act.kind = opt.gated ? GMM_ACT_SWIGLU : GMM_ACT_SILU;
    mlp_config.save = policy->save;
    mlp_config.overwrite_saved = 1;
    mlp_config.recipe = f->recipe;
    quant.recipe = &recipe;
    grad.mat = &mat;
    mlp.config = &mlp_config;
    mlp.groups = &groups;
    mlp.x = mlp.w1 = mlp.w2 = mlp.y = mlp.dy = mlp.dx = &mat;
    mlp.dw1 = mlp.dw2 = &grad;
    if (f->recipe != GMM_RECIPE_NONE) mlp.quant = &quant;
    if (gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &fwd) || gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &mlp, &bwd))
        die("%s", gmm_last_error(ctx));
    a.possible = 1;
    a.layer = (double)fwd.saved_bytes + rows * (12 + (policy->copies ? 0 : row));
    a.input = rows * row / (double)opt.topk;
    a.under_way = 4 * rows * row +
                  (double)(fwd.workspace_bytes > bwd.workspace_bytes ? fwd.workspace_bytes : bwd.workspace_bytes);
    a.kept = (double)(opt.layers * opt.in_flight) * a.layer + a.under_way;
    a.recomputed = (double)(opt.layers * opt.in_flight) * a.input + a.layer + a.under_way;
    return a;
}

/* Bytes that a GPU receives in a micro-batch from the all-to-alls of `ranks` GPUs that divide the experts. Four times a
   layer every row travels: to its expert and back, and so do their gradients (GShard, arXiv:2006.16668); of n ranks, to
   which tokens choose experts evenly, a row comes from another one in (n - 1) / n of the cases. */
static double all_to_all_bytes(double ranks) {
    return (double)opt.layers * 4 * (double)opt.tokens * 2 * (double)opt.hidden * (ranks - 1) / ranks;
}

/* Results for one number of GPUs. */
typedef struct estimate {
    int gpus;
    gmm_gtp_memory memory;
    gmm_gtp_forecast step;
    gmm_gtp_stage fc[2]; /* of a middle layer */
    double saved;        /* activations, as --save-policy and --recompute say */
    double total;        /* memory with activations and --other */
    int fits;            /* into --capacity */
} estimate;

/* gmm_gtp counts shards, buffers and what ranks receive: of a tensor that n ranks gather or reduce, (n - 1) / n
   (doc/PERFORMANCE.md of nccl-tests). AdamW keeps 12 bytes a weight (ZeRO, arXiv:1910.02054, section 3.1). */
static estimate estimate_of(int gpus) {
    const struct format *f = format_of(opt.format);
    const activations a = activations_of(policy_of(opt.save_policy));
    const int64_t rows[2] = {opt.ffn * (1 + opt.gated), opt.hidden}, cols[2] = {opt.hidden, opt.ffn};
    const int n = (int)opt.layers * 2;
    gmm_gtp_stage *stages = (gmm_gtp_stage *)get((size_t)n * sizeof *stages);
    gmm_shard shards[2];
    gmm_error error;
    estimate o;
    int64_t staged = 0;
    if (!a.possible) die("--save-policy %s: --format %s has no quantized copies", opt.save_policy, opt.format);
    memset(&o, 0, sizeof o);
    memset(shards, 0, sizeof shards);
    o.gpus = gpus;
    for (int k = 0; k < 2; k++) {
        gmm_gtp_use use = GMM_ZERO;
        gmm_gtp_memory alone = GMM_ZERO;
        shards[k].dtype = f->dtype;
        shards[k].scaling = f->scaling;
        shards[k].rows = rows[k];
        shards[k].cols = cols[k];
        shards[k].gtp_size = gpus;
        use.bundle = (int32_t)opt.experts;
        use.shard = &shards[k];
        use.layers = opt.layers;
        /* FC1 and FC2 alternate: of n gathers in a row at most (n + 1) / 2 are of one of them. */
        use.gather_slots = (int32_t)(opt.prefetch + opt.together + 1) / 2;
        use.wgrad_slots = (int32_t)opt.slots;
        use.main_grad = GMM_F32;
        use.wire = !strcmp(opt.wire, "f32") ? GMM_F32 : GMM_BF16;
        use.all_to_all = use.wire == GMM_BF16 && gpus > 2;
        use.reduce_slots = use.all_to_all;
        use.optimizer_ranks = (int32_t)opt.optimizer_ranks;
        if (gmm_gtp_memory_add(&use, &o.memory, &error) || gmm_gtp_memory_add(&use, &alone, &error))
            die("%s", error.text);
        staged += alone.stage * ((opt.together + 1 - k) / 2); /* those gathered together begin with an FC1 */
        o.step.wire = use.wire;
    }
    if (opt.together > 1) { /* what is gathered together is staged side by side; of one weight, in o.memory already */
        o.memory.total += staged - o.memory.stage;
        o.memory.stage = staged;
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
    o.step.prefetch = (int32_t)(opt.prefetch < n ? opt.prefetch : n);
    o.step.together = (int32_t)opt.together;
    o.step.wgrad_slots = (int32_t)opt.slots * 2; /* slots for both shapes */
    o.step.wrap = (int32_t)opt.wrap;
    if (gmm_gtp_foresee(&o.step, stages, &error)) die("%s", error.text);
    o.fc[0] = stages[n / 2 - n / 2 % 2];
    o.fc[1] = stages[n / 2 - n / 2 % 2 + 1];
    free(stages);
    o.saved = opt.recompute ? a.recomputed : a.kept;
    o.total = (double)o.memory.total + o.saved + 1e9 * opt.other;
    o.fits = o.total <= 1e9 * opt.capacity;
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
    {"saved", "activations from forward to backward, as --save-policy, --recompute, --in-flight say, with the rows"},
    {"", "and the workspace of the layer under way (as the CPU engine asks; engines of GPUs may ask for more)"},
    {"other", "as --other says"},
};
static const legend saved_legend[] = {
    {"layer", "what a layer saves in forward, with the rows of x where backward reads them"},
    {"kept", "all layers, and rows and workspace of the one under way"},
    {"recompute", "the same with --recompute: layers keep their input, run again in backward, and gather again"},
};
static const legend bytes_legend[] = {
    {"gathered", "weights, in forward and backward, as gmm_gtp_statistics counts them"},
    {"reduced", "gradients, likewise"},
    {"GTP", "both"},
    {"EP", "the all-to-alls of --ep GPUs that divide the experts; tokens choose experts evenly"},
    {"EP more", "what these would receive besides, if the GPUs of the row divided the experts, too, instead of GTP"},
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
    printf("GEMMs at %g TFLOP/s, %g GB/s in a node of %lld and %g GB/s across, %g us, gradients in %s; weights: %lld "
           "ahead, %lld together\n\n", opt.gemm, opt.link, (long long)opt.node, opt.network, opt.latency, opt.wire,
           (long long)opt.prefetch, (long long)opt.together);
    printf("Memory of a GPU in GB\n%6s %9s %9s %9s %9s %9s %9s %9s %9s %9s %5s\n", "GPUs", "weights", "gradient",
           "moments", "gathered", "wgrad", "received", "saved", "other", "total", "fits");
    for (int i = 0; i < count; i++) {
        const gmm_gtp_memory *m = &o[i].memory;
        printf("%6d %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f %5s\n", o[i].gpus, gb * (double)m->weights,
               gb * (double)m->main_grads, gb * (double)m->optimizer, gb * (double)(m->gather + m->stage),
               gb * (double)m->wgrad, gb * (double)m->reduce, gb * o[i].saved, opt.other, gb * o[i].total,
               o[i].fits ? "yes" : "no");
    }
    print_legend(memory_legend, sizeof memory_legend / sizeof memory_legend[0]);
    printf("\nActivations of a GPU in GB, by what forward saves\n%14s %9s %9s %9s\n", "", "layer", "kept", "recompute");
    for (int i = 0; i < POLICIES; i++) {
        const activations a = activations_of(&policies[i]);
        if (a.possible)
            printf("%14s %9.3f %9.3f %9.3f\n", policies[i].name, gb * a.layer, gb * a.kept, gb * a.recomputed);
        else printf("%14s %9s %9s %9s\n", policies[i].name, "-", "-", "-");
    }
    print_legend(saved_legend, sizeof saved_legend / sizeof saved_legend[0]);
    printf("\nWhat a GPU receives in a micro-batch, in GB\n%6s %9s %9s %9s %9s %9s\n", "GPUs", "gathered", "reduced",
           "GTP", "EP", "EP more");
    for (int i = 0; i < count; i++) {
        const double gathered = (double)o[i].step.gathered_bytes, reduced = (double)o[i].step.reduced_bytes;
        const double ep = all_to_all_bytes((double)opt.ep), more = all_to_all_bytes((double)opt.ep * o[i].gpus) - ep;
        printf("%6d %9.3f %9.3f %9.3f %9.3f %9.3f\n", o[i].gpus, gb * gathered, gb * reduced,
               gb * (gathered + reduced), gb * ep, gb * more);
    }
    print_legend(bytes_legend, sizeof bytes_legend / sizeof bytes_legend[0]);
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

/* The rows of all numbers of GPUs; how many. */
static int estimates(estimate *rows) {
    int count = 0;
    for (int64_t g = 1; g <= opt.gpus && count < ROWS; g *= 2) rows[count++] = estimate_of((int)g);
    return count;
}

/* The row with the shortest step of those that fit; NULL = none fits. */
static const estimate *fastest(const estimate *o, int count) {
    const estimate *best = NULL;
    for (int i = 0; i < count; i++)
        if (o[i].fits && (!best || o[i].step.step < best->step.step)) best = &o[i];
    return best;
}
static const estimate *smallest(const estimate *o, int count) {
    const estimate *least = o;
    for (int i = 1; i < count; i++)
        if (o[i].total < least->total) least = &o[i];
    return least;
}

/* Changes that save memory, from those that cost least. */
static const struct change { const char *name, *value, *what; } changes[] = {
    {"wgrad-slots", "1", "reductions no longer overlap the next gradient"},
    {"optimizer-ranks", "8", "data-parallel GPUs share moments and fp32 copy"},
    {"save-policy", "nothing", "FC1 runs again in backward"},
    {"recompute", "1", "layers run again in backward"},
    {"tokens", "half", "smaller micro-batches, twice as many"},
    {"layers", "half", "twice as many pipeline stages"},
};
enum { CHANGES = sizeof changes / sizeof changes[0] };

/* Makes a change and returns 1, unless it changes nothing. */
static int make_change(const struct change *c, char value[64]) {
    option *o = options;
    option_error error;
    char before[64];
    while (strcmp(o->name, c->name)) o++;
    option_text(o, before, sizeof before);
    if (strcmp(c->value, "half")) snprintf(value, 64, "%s", c->value);
    else snprintf(value, 64, "%lld", (long long)((*(const int64_t *)o->value + 1) / 2));
    if (!strcmp(before, value) || (!strcmp(c->name, "optimizer-ranks") && opt.optimizer_ranks > 8)) return 0;
    if (!option_set(o, value, "--", &error)) die("%s", error.text);
    return 1;
}

static void print_verdict(const estimate *o, int count) {
    static estimate rows[ROWS];
    static char values[CHANGES][64]; /* options may point here */
    const estimate *best = fastest(o, count), *least = smallest(o, count);
    const struct settings before = opt;
    int found = 0;
    printf("\nVerdict, for %g GB a GPU\n", opt.capacity);
    if (best) {
        const double waits = best->step.step > 0 ? 100 * (1 - best->step.compute / best->step.step) : 0;
        printf("  It fits. The shortest step of those that fit: %d GPU%s, %.1f GB, %.2f ms a micro-batch, of which "
               "%.1f %% wait\n  for gathers and reductions.\n", best->gpus, best->gpus > 1 ? "s share" : "",
               1e-9 * best->total, 1e3 * best->step.step, waits);
        if (waits > 20)
            printf("  That is much: more --tokens give gathers longer GEMMs to hide behind; dividing the experts over "
                   "these GPUs\n  instead receives %.1f GB more a micro-batch, GTP %.1f GB.\n",
                   1e-9 * (all_to_all_bytes((double)opt.ep * best->gpus) - all_to_all_bytes((double)opt.ep)),
                   1e-9 * (double)(best->step.gathered_bytes + best->step.reduced_bytes));
        return;
    }
    printf("  It does not fit: the least is %.1f GB, with %d GPU%s, %.1f GB too much. What one change makes of it:\n",
           1e-9 * least->total, least->gpus, least->gpus > 1 ? "s" : "", 1e-9 * least->total - opt.capacity);
    for (int all = 0; all < 2 && !found; all++) { /* each alone, then one after another */
        opt = before;
        if (all) printf("  None alone suffices. One after another:\n");
        for (int i = 0; i < CHANGES && !(all && found); i++) {
            const estimate *now;
            int made;
            if (!all) opt = before;
            if (!make_change(&changes[i], values[i])) continue;
            made = estimates(rows);
            now = fastest(rows, made);
            found |= now != NULL;
            if (!now) now = smallest(rows, made);
            printf("    --%s=%s: %.1f GB with %d GPU%s, %s (%s)\n", changes[i].name, values[i], 1e-9 * now->total,
                   now->gpus, now->gpus > 1 ? "s" : "", now->fits ? "fits" : "does not fit", changes[i].what);
        }
    }
    if (!found) printf("  All of this is too little: take less of --other, more --gpus, or more pipeline stages.\n");
    opt = before;
}

static void write_svg(const estimate *o, int count, const char *path) {
    double x[ROWS], compute[ROWS], gather[ROWS], step[ROWS], total[ROWS], buffers[ROWS], shards[ROWS];
    double saved[ROWS], capacity[ROWS];
    svg_box times = {0, 0, 760, 360}, memory = {0, 360, 760, 360};
    const svg_series lines[] = {{"GEMMs", "#4477aa", 0, count, x, compute},
                                {"and exposed gathers", "#ccbb44", 0, count, x, gather},
                                {"and exposed reductions", "#ee6677", 0, count, x, step}};
    const svg_series bytes[] = {{"shards: weights, gradients, moments", "#4477aa", 0, count, x, shards},
                                {"buffers: gathered, wgrad, received", "#ccbb44", 0, count, x, buffers},
                                {"activations", "#228833", 0, count, x, saved},
                                {"total, with all else", "#ee6677", 1, count, x, total},
                                {"memory of the GPU", "#777777", 1, count, x, capacity}};
    FILE *out;
    make_folder_of(path);
    out = fopen(path, "w");
    if (!out) die("cannot write %s: %s", path, strerror(errno));
    for (int i = 0; i < count; i++) {
        const gmm_gtp_memory *m = &o[i].memory;
        x[i] = log2(o[i].gpus);
        compute[i] = 1e3 * o[i].step.compute;
        gather[i] = compute[i] + 1e3 * o[i].step.exposed_gather;
        step[i] = 1e3 * o[i].step.step;
        shards[i] = 1e-9 * (double)(m->weights + m->main_grads + m->optimizer);
        buffers[i] = 1e-9 * (double)(m->gather + m->stage + m->wgrad + m->reduce);
        saved[i] = 1e-9 * o[i].saved;
        total[i] = 1e-9 * o[i].total;
        capacity[i] = opt.capacity;
    }
    svg_begin(out, 760, 720);
    svg_lines(out, times, "A micro-batch", "log2 of the GPUs that share a weight", "ms", lines, 3);
    svg_lines(out, memory, "Memory of a GPU", "log2 of the GPUs that share a weight", "GB", bytes, 5);
    svg_end(out);
    if (fclose(out)) die("cannot write %s: %s", path, strerror(errno));
    printf("\npicture: %s\n", path);
}

int main(int argc, char **argv) {
    static estimate rows[ROWS];
    option_error error;
    int count = 0;
    program_name = "gtp_planner";
    if (!options_parse(options, OPTIONS, argc, argv, &error)) die("%s", error.text);
    if (opt.help) {
        printf("usage: gtp_planner [options]\nMemory of expert weights sharded over GPUs, and what stays exposed.\n\n");
        options_print(options, OPTIONS);
        return 0;
    }
    count = estimates(rows);
    print_table(rows, count);
    print_verdict(rows, count);
    if (*opt.svg && count > 1) write_svg(rows, count, opt.svg);
    return 0;
}
