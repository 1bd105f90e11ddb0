/* checksums - a table of hashes of what every operation writes, for a fixed list of cases and every engine present.
 *     checksums [--base FILE] [--filter WORDS] [--threads N] [--vector-level N] [--list] > FILE
 * Two tables of the same machine and engine agree row by row if a change has altered no bit. Rows of the CPU engine
 * are made with one vector level (2, or 1 where the processor lacks AVX2), since levels with and without fused
 * multiply-add round differently; they depend on no number of threads. */
#include "case_ids.h"
#include "cases.h"

#ifdef HAVE_CUDA
#include "device.h"
#endif

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------------------------------------- Cases --- */

/* What each engine runs. A row is opened with '.' and the engine behind it. Braces hold alternatives, as a shell's. */
static const char *const PATTERNS[] = {
    /* products of 16- and 32-bit operands: sizes around tiles of 64 to 256, few and many rows, odd features */
    "linear.{fwd,dgrad,wgrad}.{f32,f16,bf16}.g5.k264.n392.t300.past3.{even,skew,odd}",
    "linear.{fwd,dgrad,wgrad}.{bf16,f16}.g3.k{128,520}.n{192,256}.t{3,200,500}.odd",
    "linear.{fwd,dgrad,wgrad}.bf16.g2.k1032.n328.t{64,129,257,390}.even",
    "linear.{fwd,dgrad,wgrad}.bf16.g7.k72.n104.t150.{one,none}.past2.zerotail",
    "linear.{fwd,dgrad,wgrad}.{bf16,f32}.g4.k67.n45.t91.odd.past5",
    "linear.{fwd,dgrad}.{bf16,f16}.g32.k256.n256.t{32,512}.skew",
    "linear.wgrad.bf16.g32.k256.n128.t{32,900}.skew.{main32,store32}",
    "linear.fwd.bf16.g5.k264.n392.t300.skew.{bias,bias.scale,alpha,add,to32,table,bias.scale.alpha.add.to32.table}",
    "linear.dgrad.bf16.g5.k264.n392.t300.skew.{alpha,add,to32,table}",
    "linear.wgrad.{bf16,f16}.g5.k264.n392.t300.skew.{main32,store32,frozen,table,alpha.main32.table.frozen}",
    "linear.bgrad.{f32,f16,bf16}.g5.n392.t300.skew.{store32,main32,scale.store32,frozen}",
    /* quantized products */
    "linear.{fwd,dgrad}.{fp8-delayed,fp8-tensor,fp8-row,fp8-1x128,fp8-1x128-fp32scales,fp8-1x128-1x128,mx8,mx8-mx4,"
        "mx8-swizzled,wonly-mx8,wonly-mx4,nv4,nv4-plain,nv4-46,wonly-nv4}.g5.k256.n384.t300.past3.{even,skew}",
    "linear.fwd.nv4-rowamax.g5.k256.n384.t300.past3.skew",
    "linear.wgrad.{fp8-delayed,fp8-tensor,fp8-row,fp8-1x128,mx8,nv4,nv4-plain}.g5.k256.n384.t300.skew.{store32,main32}",
    "linear.{fwd,dgrad}.{fp8-tensor,fp8-1x128,mx8,nv4}.g3.k640.n224.t{5,130,600}.odd",
    "linear.wgrad.{fp8-tensor,fp8-1x128,mx8,nv4}.g3.k640.n224.t{5,130,600}.odd",
    "linear.{fwd,dgrad}.{fp8-tensor,fp8-row}.g3.k640.n224.t600.odd.fastaccum",
    "linear.{fwd,dgrad}.{fp8-1x128,mx8}.g4.k288.n96.t77.odd.{to32,add}",
    /* activations */
    "act.{fwd,bwd}.{relu,relu2,gelu,qgelu,silu,glu,reglu,relu2glu,geglu,qgeglu,swiglu,situglu}.{f32,bf16}.g4.n72.t99."
        "skew.prob",
    "act.{fwd,bwd}.{gelu_erf,geglu_erf}.{f32,bf16}.g4.n72.t99.skew.prob",
    "act.{fwd,bwd}.{glu,reglu,relu2glu,geglu,qgeglu,swiglu,situglu}.f16.g4.n72.t99.skew.block8.past2.zerotail",
    "act.{fwd,bwd}.{swiglu.limit,gptoss,swiglu.block32,swiglu.to32}.bf16.g4.n96.t133.odd.prob",
    "act.{fwd,bwd}.{f32,bf16}.g4.n40.t57.odd.prob",
    "act.bwd.{swiglu,gelu}.bf16.g4.n77.t133.odd.prob.saveact",
    /* the expert MLP */
    "mlp.{fwd,train}.{f32,f16,bf16}.swiglu.g5.k136.n72.t150.skew.past3.{prob,bias.prob}",
    "mlp.train.bf16.{relu2,gelu,silu,geglu,gptoss,situglu}.g4.k128.n64.t140.odd.bias",
    "mlp.train.bf16.swiglu.g4.k128.n64.t140.odd.prob.{saveact,savenothing,delay,delay.saveact,delay.savenothing,main32,"
        "store32,table,block8,frozen}",
    "mlp.{fwd,train}.{fp8-delayed,fp8-tensor,fp8-row,fp8-1x128,mx8,mx8-mx4,wonly-mx4,nv4}.swiglu.g4.k128.n256.t140."
        "skew.prob.store32",
    "mlp.train.{fp8-tensor,fp8-1x128,mx8,nv4}.swiglu.g4.k128.n256.t140.skew.{saveact,savenothing,delay.main32,"
        "bias.prob,cached,weightcache,saveq,savee4m3,saveq.savee4m3,saveq.delay,bwdhigh,bwddeq,saveq.bwddeq}",
    /* routing, permutation, padding, interleaving */
    "route.{fwd,bwd}.{f32,f16,bf16}.g{8,60,256}.top{1,6}.t131.aux",
    "route.{fwd,bwd}.f32.g64.top8.t200.{sigmoid.bias.normalize,sigmoid.aux,normalize.bias}",
    "{permute,unpermute}.{fwd,bwd}.{f32,f16,bf16}.g7.top3.k88.t130.prob.align{0,16}.past4",
    "{permute,unpermute}.{fwd,bwd}.bf16.g16.top2.k{256,77}.t90.zerotail.past4",
    "permute.map.g{4,200}.top4.t500.align{0,32}",
    "pad.{pad,unpad}.{f32,bf16}.g6.k{40,77}.t90.{skew,odd}.align16.prob.past2",
    "glu.{rows,columns}.{bf16,f32}.count3.n64.k24.block{1,8,64}.{inverse,}",
    /* casts */
    "cast.quantize.{fp8-delayed,fp8-tensor,fp8-1x128,mx8,nv4-plain}.{f32,bf16,f16}.grouped.g5.k256.t210.skew",
    "cast.quantize.nv4.bf16.grouped.g5.k256.t210.skew",
    "cast.quantize.{fp8-row,fp8-1x128-fp32scales,mx8-swizzled}.bf16.grouped.g5.k256.t210.odd.past5.zerotail",
    "cast.quantize.{fp8-delayed,fp8-tensor,fp8-row,fp8-1x128,mx8,mx8-mx4,nv4,nv4-46}.bf16.weight.count3.k256.t160",
    "cast.quantize.{fp8-delayed,fp8-tensor,fp8-1x128,mx8,nv4}.bf16.grad.grouped.g5.k256.t210.skew",
    "cast.quantize.{fp8-tensor,fp8-1x128,mx8,nv4}.bf16.grouped.g5.k384.t333.odd.{rowwise,columnwise,db.store32}",
    "cast.quantize.nv4-rowamax.bf16.grouped.g5.k256.t210.skew.rowwise",
    "cast.requantize.{fp8-tensor,fp8-1x128,mx8,nv4-plain}.bf16.grouped.g5.k256.t210.skew",
    "cast.dequantize.{fp8-delayed,fp8-tensor,fp8-row,fp8-1x128,mx8,nv4-plain}.bf16.{grouped.g5,count2}.k256.t210.skew."
        "{rowwise,columnwise}.{to32,to16}",
    "cast.transpose.{fp8-tensor,fp8-1x128,nv4}.bf16.weight.count3.k256.t160",
    "cast.update.t37.n{1,16}.{recent,}",
    "cast.shard.{fp8-delayed,fp8-tensor,fp8-1x128,mx8,nv4}.bf16.weight.count3.k256.t96",
    /* small operations */
    "small.accumulate.{f32,f16,bf16}.count{1,3}.t33.k77.{to32,to16,add.to32}",
    "small.convert.{f32,f16,bf16}.t33.k77.{to32,to16}",
    "small.offsets.g{1,9,300}.t500.past3.{even,skew,none}",
    /* the whole layer */
    "layer.{fwd,train}.{f32,f16,bf16}.swiglu.g7.top3.k88.n72.t90.{,prob,aux,prob.aux,bias.prob,bias.align16}",
    "layer.train.{fp8-delayed,fp8-tensor,fp8-1x128,mx8,mx8-mx4,nv4}.swiglu.g5.top2.k128.n256.t70.{,prob,"
        "prob.aux.saveq}",
    "layer.train.bf16.swiglu.g5.top2.k128.n64.t70.prob.{saveact,savenothing,main32,to32,table}",
    /* gathered rows */
    "linear.{fwd,dgrad,wgrad,bgrad}.{f32,f16,bf16}.g5.k264.n392.t300.skew.past3.top{1,4}",
    "linear.{fwd,dgrad}.{wonly-mx8,wonly-nv4}.g5.k256.n384.t300.skew.top3",
    "cast.quantize.{fp8-delayed,fp8-tensor,fp8-row,fp8-1x128,mx8}.{f32,bf16,f16}.grouped.g5.k{256,97}.t210.skew.top3",
    "cast.quantize.nv4-plain.{f32,bf16,f16}.grouped.g5.k{256,98}.t210.skew.top3",
    "cast.quantize.{fp8-tensor,fp8-1x128,mx8,nv4}.bf16.grad.grouped.g5.k256.t210.odd.past5.zerotail.top2",
};

/* What runs on GPUs alone: every tile that could serve a product (numbers past the last take the default), more tiles
 * than multiprocessors, and few rows for many weights. */
static const char *const GPU_PATTERNS[] = {
    "linear.{fwd,dgrad,wgrad}.{bf16,fp8-tensor,fp8-1x128}.g5.k512.n768.t1900.odd.tile{1,2,3,4,5,6,7,8,9,10,11,12}",
    "linear.{fwd,dgrad,wgrad}.{bf16,f16,fp8-tensor,fp8-row,fp8-1x128,fp8-1x128-1x128,mx8,nv4}.g6.k1024.n2048.t7000."
        "skew",
    "linear.{fwd,dgrad}.{bf16,fp8-tensor,fp8-1x128,mx8}.g16.k2048.n1536.t{1,16,256,1000}.skew",
    "linear.wgrad.{bf16,fp8-tensor,fp8-1x128}.g16.k1536.n1024.t4096.skew.{main32,store32}",
    "mlp.train.{bf16,fp8-tensor,fp8-1x128,mx8,nv4}.swiglu.g8.k1024.n512.t2048.skew.prob.main32",
    "cast.quantize.{fp8-tensor,fp8-1x128,mx8,nv4}.bf16.grouped.g8.k2048.t3000.skew",
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static void *need(void *p) {
    if (!p) {
        fprintf(stderr, "checksums: no memory\n");
        exit(1);
    }
    return p;
}

/* ------------------------------------------------------------------------------------------------------- Memory --- */

static void **blocks;
static int block_count, block_room;
static void *host_alloc(size_t bytes) {
    void *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 64;
        blocks = (void **)need(realloc(blocks, (size_t)block_room * sizeof *blocks));
    }
    return blocks[block_count++] = p;
}
static void host_reset(void) {
    while (block_count > 0) free(blocks[--block_count]);
}
static void host_put(void *to, const void *host, size_t bytes) { memcpy(to, host, bytes); }
static void host_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static void host_set(void *to, int byte, size_t bytes) { memset(to, byte, bytes); }
static const case_memory HOST_MEMORY = { host_alloc, host_put, host_copy, host_set };

#ifdef HAVE_CUDA
static void *gpu_alloc(size_t bytes) { return device_alloc(bytes, 256, 0); }
static const case_memory GPU_MEMORY = { gpu_alloc, device_put, device_copy, device_set };
#endif

/* --------------------------------------------------------------------------------------------------------- Hash --- */

static uint64_t fnv(uint64_t h, const unsigned char *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) h = (h ^ p[i]) * UINT64_C(0x100000001B3);
    return h;
}

static uint64_t hash_of(const case_run *run, int gpu) {
    const case_output *o;
    const int n = case_outputs(run, &o);
    uint64_t h = UINT64_C(0xCBF29CE484222325);
    for (int i = 0; i < n; i++) {
        const unsigned char *p = (const unsigned char *)o[i].data;
#ifdef HAVE_CUDA
        if (gpu) {
            unsigned char *copy = (unsigned char *)need(malloc(o[i].bytes + 1));
            device_get(copy, p, o[i].bytes);
            h = fnv(h, copy, o[i].bytes);
            free(copy);
            continue;
        }
#endif
        h = fnv(h, p, o[i].bytes);
    }
    (void)gpu;
    return h;
}

/* ---------------------------------------------------------------------------------------------------------- Run --- */

typedef struct table { case_ids ids; char (*hash)[24]; } table;

/* Runs a case; writes its hash, or "declined". Returns 0, or 1 after a failure that is printed. */
static int run_case(const char *id, int gpu, char hash[24]) {
    case_run *run = NULL;
    int result = case_open(id, &run);
    if (result == CASE_OK) result = case_launch(run);
#ifdef HAVE_CUDA
    if (gpu && result == CASE_OK) {
        const char *text = device_wait();
        if (text) {
            fprintf(stderr, "checksums: %s: %s\n", id, text);
            exit(1); /* the process cannot use the device any more */
        }
    }
#endif
    strcpy(hash, result == CASE_DECLINED ? "declined" : "failed");
    if (result == CASE_OK) snprintf(hash, 24, "%016" PRIx64, hash_of(run, gpu));
    if (result == CASE_FAILED) fprintf(stderr, "checksums: %s\n", case_error());
    case_close(run);
    host_reset();
#ifdef HAVE_CUDA
    if (gpu) device_reset();
#endif
    return result == CASE_FAILED;
}

typedef struct options { const char *base, *filter; int threads, level, list; } options;

static int wanted(const char *id, const char *filter) { return !filter || strstr(id, filter) != NULL; }

/* Every case on every engine of one space. */
static int run_space(const options *o, int gpu, table *t) {
    static const char *const engines[] = { "mma", "wgmma", "cublaslt.hostsplit", "cpu" };
    case_ids list;
    int failed = 0;
    memset(&list, 0, sizeof list);
    for (size_t i = 0; i < COUNT(PATTERNS); i++) case_ids_expand(&list, PATTERNS[i]);
    for (size_t i = 0; gpu && i < COUNT(GPU_PATTERNS); i++) case_ids_expand(&list, GPU_PATTERNS[i]);
    for (int i = 0; i < list.count; i++)
        for (int e = gpu ? 0 : 3; e < (gpu ? 3 : 4); e++) {
            char id[256], hash[24] = "";
            snprintf(id, sizeof id, "%s.%s", list.id[i], engines[e]);
            if (!wanted(id, o->filter)) continue;
            if (!o->list) failed += run_case(id, gpu, hash);
            case_ids_expand(&t->ids, id);
            t->hash = (char(*)[24])need(realloc(t->hash, (size_t)t->ids.capacity * sizeof *t->hash));
            strcpy(t->hash[t->ids.count - 1], hash);
            printf("%s %s\n", id, o->list ? "" : hash);
        }
    case_ids_free(&list);
    return failed;
}

static int begin(const case_memory *memory, void *stream, int gpu, const options *o, int level) {
    case_setup setup;
    memset(&setup, 0, sizeof setup);
    setup.memory = memory;
    setup.stream = stream;
    setup.gpu = gpu;
    setup.threads = o->threads;
    setup.vector_level = level;
    return case_begin(&setup);
}

static int run_all(const options *o, table *t) {
    int failed = 0;
    if (begin(&HOST_MEMORY, NULL, 0, o, o->level ? o->level : 2) != CASE_OK &&
        (o->level || begin(&HOST_MEMORY, NULL, 0, o, 1) != CASE_OK)) {
        fprintf(stderr, "checksums: %s\n", case_error());
        return 1;
    }
    failed += run_space(o, 0, t);
    case_end();
#ifdef HAVE_CUDA
    if (device_count() > 0) {
        const char *why;
        gmm_stream stream = device_open((size_t)1 << 30, &why);
        if (!stream || begin(&GPU_MEMORY, stream, 1, o, 0) != CASE_OK) {
            fprintf(stderr, "checksums: %s\n", stream ? case_error() : why);
            return 1;
        }
        failed += run_space(o, 1, t);
        case_end();
        device_close();
    }
#endif
    return failed;
}

/* ------------------------------------------------------------------------------------------------------ Compare --- */

static int order(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Compares the table with a file of an earlier run. Rows of engines that this machine lacks do not count as missing. */
static int compare(const table *t, const options *o) {
    FILE *f = fopen(o->base, "r");
    char id[256], hash[64], engines[256] = "";
    char *seen = (char *)need(calloc((size_t)t->ids.count + 1, 1));
    int equal = 0, differing = 0, missing = 0, fresh = 0, left = 0;
    char **index = (char **)need(malloc(((size_t)t->ids.count + 1) * sizeof *index));
    if (!f) {
        fprintf(stderr, "checksums: cannot read %s\n", o->base);
        return 1;
    }
    for (int i = 0; i < t->ids.count; i++) {
        const char *e = strrchr(t->ids.id[i], '.');
        index[i] = t->ids.id[i];
        if (!strstr(engines, e) && strlen(engines) + strlen(e) + 2 < sizeof engines) strcat(strcat(engines, e), " ");
    }
    /* `index` is sorted by id; hashes are at the same positions as in t */
    qsort(index, (size_t)t->ids.count, sizeof *index, order);
    while (fscanf(f, "%255s %63s", id, hash) == 2) {
        char *key = id, **hit;
        char engine[64];
        int at = 0;
        if (!wanted(id, o->filter)) continue;
        hit = (char **)bsearch(&key, index, (size_t)t->ids.count, sizeof *index, order);
        snprintf(engine, sizeof engine, "%.60s ", strrchr(id, '.') ? strrchr(id, '.') : id);
        if (!hit && !strstr(engines, engine)) { left++; continue; }
        if (!hit) {
            fprintf(stderr, "missing    %s\n", id);
            missing++;
            continue;
        }
        while (t->ids.id[at] != *hit) at++;
        seen[at] = 1;
        if (!strcmp(t->hash[at], hash)) equal++;
        else {
            fprintf(stderr, "differs    %s: %s, here %s\n", id, hash, t->hash[at]);
            differing++;
        }
    }
    fclose(f);
    for (int i = 0; i < t->ids.count; i++)
        if (!seen[i]) {
            fprintf(stderr, "new        %s\n", t->ids.id[i]);
            fresh++;
        }
    fprintf(stderr, "checksums: %d equal, %d differ, %d missing, %d new, %d of engines that are not here\n", equal,
            differing, missing, fresh, left);
    free(seen);
    free(index);
    return differing > 0 || missing > 0 || equal == 0;
}

int main(int argc, char **argv) {
    options o;
    table t;
    int failed;
    memset(&o, 0, sizeof o);
    memset(&t, 0, sizeof t);
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--list")) o.list = 1;
        else if (!strcmp(argv[i], "--base")) o.base = value, i++;
        else if (!strcmp(argv[i], "--filter")) o.filter = value, i++;
        else if (!strcmp(argv[i], "--threads")) o.threads = atoi(value), i++;
        else if (!strcmp(argv[i], "--vector-level")) o.level = atoi(value), i++;
        else {
            fprintf(stderr, "checksums: unknown argument %s\n", argv[i]);
            return 2;
        }
    }
    failed = run_all(&o, &t);
    if (o.list) return failed != 0;
    fprintf(stderr, "checksums: %d rows, %d failed\n", t.ids.count, failed);
    if (o.base && compare(&t, &o)) failed++;
    case_ids_free(&t.ids);
    free(t.hash);
    free(blocks);
    return failed != 0;
}
