/* test_gtp_gpu.c - the GTP runtime on GPU ranks, which train a chain of grouped linear layers over NCCL or peer copies.
   Results must equal those of one GPU that processes all micro-batches. Where there are two GPUs or more, a rank is a
   thread with a GPU of its own; with one GPU, two ranks are processes that share it over peer copies, and NCCL is not
   tested. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#endif
#include "gtp_world.h"
#include "process_ranks.h"

#include <string.h>

/* Without NCCL or CUDA the functions return an error that names what the build lacks; with them they check their
   arguments. */
static void arguments(int arg) {
    gmm_nccl_config nccl = GMM_ZERO;
    gmm_peers_config peers = GMM_ZERO;
    gmm_comm comm;
    gmm_error error = GMM_ZERO;
    (void)arg;
    memset(&comm, 0xFF, sizeof comm);
#if defined(HAVE_CUDA) && defined(HAVE_NCCL)
    T_CHECK(gmm_nccl_open(&nccl, NULL, &error) == GMM_E_NULL && strstr(error.text, "out"), "%s", error.text);
    T_CHECK(gmm_nccl_open(&nccl, &comm, &error) == GMM_E_NULL && strstr(error.text, "comm"), "%s", error.text);
#else
    T_CHECK(gmm_nccl_open(&nccl, &comm, &error) == GMM_E_BUILD && strstr(error.text, "GMM_WITH_NCCL"), "%s",
            error.text);
#endif
    T_CHECK(comm.self == NULL && comm.all_gather == NULL, "the communicator is not zeroed");
#ifdef HAVE_CUDA
    T_CHECK(gmm_peers_open(&peers, &comm, &error) == GMM_E_NULL && strstr(error.text, "ctx"), "%s", error.text);
    peers.struct_size = sizeof peers + 8;
    T_CHECK(gmm_peers_open(&peers, &comm, &error) == GMM_E_VERSION && strstr(error.text, "struct_size"), "%s",
            error.text);
#else
    T_CHECK(gmm_peers_open(&peers, &comm, &error) == GMM_E_BUILD && strstr(error.text, "nvcc"), "%s", error.text);
#endif
    gmm_nccl_close(&comm);
    gmm_peers_close(&comm);
    gmm_nccl_close(NULL);
    gmm_peers_close(NULL);
}

/* gmm_gtp_view.leave: SMs that a GEMM leaves free for the following gather in forward, and for reductions and their
   sums in backward. */
static void leaves(int arg) {
    static const int32_t members[2] = {0, 1};
    gmm_ranks_config world = GMM_ZERO;
    gmm_ranks *ranks = NULL;
    gmm_runtime rt = GMM_ZERO;
    gmm_comm gather[2], reduce[2];
    gmm_gtp_config config = GMM_ZERO;
    gmm_gtp_domain d = GMM_ZERO;
    gmm_gtp_chain chain = GMM_ZERO;
    gmm_gtp_weight w = GMM_ZERO;
    gmm_gtp_need need = GMM_ZERO;
    gmm_gtp_view forward = GMM_ZERO, backward = GMM_ZERO, dw = GMM_ZERO;
    gmm_shard shard = GMM_ZERO;
    gmm_stream compute;
    gmm_gtp *gtp = NULL;
    gmm_config cpu = GMM_ZERO;
    size_t bytes = 0;
    int32_t id, bundles[2];
    world.ranks = 2;
    if (gmm_ranks_create(&world, &ranks, NULL) == GMM_E_BUILD) t_skip("no CPU ranks");
    T_CHECK(!gmm_ranks_comms(ranks, members, 2, gather) && !gmm_ranks_comms(ranks, members, 2, reduce),
            "set-up");
    T_CHECK(!gmm_ranks_runtime(ranks, 0, &rt) && !rt.stream_create(rt.self, 0, &compute),
            "set-up");
    T_CHECK(!rt.stream_create(rt.self, 0, &d.gather_stream) && !rt.stream_create(rt.self, 0, &d.reduce_stream),
            "set-up");
    gather[0].processors = 24 * arg;
    reduce[0].processors = 40 * arg;
    config.weights = config.bundles = 2;
    config.chains = 2;
    config.ctx = t_context(&cpu);
    config.runtime = &rt;
    T_CHECK(!gmm_gtp_query(&config, &bytes, NULL) && !gmm_gtp_init(t_host(bytes), bytes, &config, &gtp, NULL),
            "set-up");
    d.gather = &gather[0];
    d.reduce = &reduce[0];
    T_CHECK(!gmm_gtp_add_domain(gtp, &d, &id),
            "set-up");
    shard.dtype = GMM_BF16;
    shard.rows = 32;
    shard.cols = 8;
    shard.gtp_size = 2;
    w.shard = &shard;
    w.main_grad_dtype = GMM_F32;
    for (int i = 0; i < 2; i++) {
        w.data[0] = t_host(512);
        w.main_grad = t_host(1024);
        T_CHECK(!gmm_gtp_add_weight(gtp, &w, &id) && !gmm_gtp_add_bundle(gtp, 0, &id, 1, "layer", &bundles[i]),
                "set-up");
    }
    chain.bundles = bundles;
    chain.count = 2;
    chain.prefetch = 1;
    T_CHECK(!gmm_gtp_add_chain(gtp, &chain, &id),
            "set-up");
    chain.pass = GMM_GTP_BACKWARD;
    chain.prefetch = 0;
    T_CHECK(!gmm_gtp_add_chain(gtp, &chain, &id) && !gmm_gtp_seal(gtp) && !gmm_gtp_memory_need(gtp, 0, &need),
            "set-up");
    {
        char *gathered = (char *)t_host(need.gather_bytes + 256), *reduced = (char *)t_host(need.reduce_bytes + 256);
        gathered += (256 - (uintptr_t)gathered % 256) % 256;
        reduced += (256 - (uintptr_t)reduced % 256) % 256;
        T_CHECK(!gmm_gtp_bind(gtp, 0, gathered, need.gather_bytes, reduced, need.reduce_bytes), "%s",
                gmm_gtp_last_error(gtp));
    }
    T_CHECK(!gmm_gtp_acquire(gtp, bundles[0], GMM_GTP_FORWARD, compute, &forward),
            "set-up");
    T_CHECK(!gmm_gtp_acquire(gtp, bundles[0], GMM_GTP_BACKWARD, compute, &backward),
            "set-up");
    T_CHECK(!gmm_gtp_wgrad(gtp, bundles[0], compute, &dw),
            "set-up");
    T_CHECK(forward.leave == 24 * arg, "%d", (int)forward.leave);
    T_CHECK(backward.leave == (arg ? 40 : 16) && dw.leave == backward.leave, "%d, %d", (int)backward.leave,
            (int)dw.leave);
    (void)gmm_gtp_fini(gtp);
    gmm_ranks_destroy(ranks);
}

#ifdef HAVE_CUDA
#include "device.h"

#include <cuda_runtime.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#ifdef HAVE_NCCL
#include <nccl.h>
#endif

enum { RANKS = 8, LAYERS = 6, EXPERTS = 4, CAST_BYTES = 8 << 20, BLOCKS = 256 };
/* ALONE: one GPU without a communicator. */
typedef enum transport { ALONE, NCCL, NCCL_WINDOWS, NCCL_ENGINES, PEERS, VIAS } transport;
enum fault { NO_FAULT, NO_MEMORY, FAILED_WINDOW, OTHER_SIZE, GIVEN_UP, SAME_GPU };
static const char *const transport_name[] = {"alone", "nccl", "nccl windows", "nccl copy engines", "peers"};

typedef struct gpu_case {
    transport transport;
    int layers, experts, rows, tokens; /* layers are rows x rows */
    int prefetch, together, steps; /* together: bundles that one call gathers; 0 = 1 */
    int synchronous, recompute, zero_rank; /* zero_rank: 1 + the rank without tokens */
    int replay;             /* 1: one graph of forward and backward, 2: a graph for each */
    int silent;             /* rank 1 stops in the second step and leaves its collectives unmatched */
    int halves;             /* every other layer is sharded over either half of the ranks alone: two domains */
    int integers;           /* tokens and gradients are -1, 0 or 1: sums of one layer's gradient are exact */
    int mlp;                /* the two layers are FC1 and FC2 of an MLP, */
    gmm_recipe_kind recipe; /* which quantizes what was gathered */
    int poison;             /* buffers of gathers and reductions are filled with NaN */
    int formats;            /* no training: gathers quantized weights and reduces amaxes, compared byte by byte */
    int sums;               /* no training: reduces random gradients */
    int fault;              /* no training: communicators fail as enum fault says */
    int cast;               /* no training: 1 + the format that weights are quantized to, for both passes */
    int one_gpu;            /* two ranks share GPU 0, also where there are more GPUs */
    float scale;            /* of gradients; 0 = 1 */
    float rate;             /* of learning; 0 = 0.0005 */
    gmm_dtype wire;
    gmm_gtp_reduction reduction;
} gpu_case;

/* Results of a run: logical weights and gradients, and every rank's last output. */
typedef struct gpu_result {
    uint16_t *weights, *outputs; /* [layers][experts][rows][rows], [ranks][tokens][rows] */
    float *grads, *others;       /* others: gradients of the layers that the second half of the ranks shards */
    unsigned char *bytes;   /* of a cast case: [ranks][CAST_BYTES] */
    int64_t byte_count[RANKS];
    gmm_gtp_statistics stats;
    double off;             /* of a sums case: error relative to the norm of the sum in fp64 */
    int rounded_once;
    gmm_status status[RANKS];
    char text[RANKS][512];
    double seconds[RANKS];  /* from the first wait for the silent rank to the error */
} gpu_result;

/* ----------------------------------------------------------------------------------- Exchange between the ranks --- */

typedef struct rendezvous {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int size, arrived, generation, broken;
    char slots[RANKS][256], all[RANKS][256];
} rendezvous;
typedef struct seat {
    rendezvous *rendezvous; /* of threads */
    process_rank *process;  /* NULL: the rank is a thread */
    int rank;
} seat;

static gmm_status host_allgather(void *user, const void *mine, void *all, size_t bytes) {
    const seat *s = (const seat *)user;
    rendezvous *h = s->rendezvous;
    struct timespec until;
    int generation;
    if (s->process) return process_exchange(s->process, mine, all, bytes);
    if (bytes > sizeof h->slots[0]) return GMM_E_COMM;
    (void)timespec_get(&until, TIME_UTC);
    until.tv_sec += 20;
    (void)pthread_mutex_lock(&h->mutex);
    memcpy(h->slots[s->rank], mine, bytes);
    generation = h->generation;
    if (++h->arrived == h->size) {
        memcpy(h->all, h->slots, sizeof h->all);
        h->arrived = 0;
        h->generation++;
        (void)pthread_cond_broadcast(&h->changed);
    }
    while (generation == h->generation && !h->broken)
        if (pthread_cond_timedwait(&h->changed, &h->mutex, &until)) h->broken = 1;
    for (int i = 0; i < h->size; i++) memcpy((char *)all + (size_t)i * bytes, h->all[i], bytes);
    (void)pthread_mutex_unlock(&h->mutex);
    return h->broken ? GMM_E_COMM : GMM_OK;
}

/* ------------------------------------------------------------------------------------------------- One rank --- */

typedef struct rank {
    const gpu_case *c;
    struct run *run;
    seat seat;
    int index, size, device, micro; /* micro: batches of this rank per step */
    gmm_context *ctx;
    gmm_runtime rt;
    gmm_stream compute, side[2];
    seat half_seat;               /* of its half of the ranks */
    gmm_comm comm[4];        /* gather, reduce; the same of its half */
    gmm_gtp *gtp;
    void *memory, *blocks[BLOCKS];
    int block_count;
    void *window[2];
    gmm_shard_plan plan, half_plan;
    uint16_t *shards, *first;    /* [layers][experts][shard_rows][rows]; first: those that training begins with */
    float *grads;
    uint16_t *y[RANKS][LAYERS + 1], *dy[RANKS][LAYERS + 1], *recomputed; /* [micro-batch] */
    int32_t *sizes[RANKS];
    void *workspace, *saved[RANKS];
    uint64_t *random;       /* of stochastic rounding */
    gmm_recipe recipe;
    size_t workspace_bytes, saved_bytes;
    int32_t bundle[LAYERS], ids[LAYERS][EXPERTS], chain[GMM_GTP_PASSES], domain, half_domain;
    int domains, rounded_once; /* rounded_once: every value of the reduction is the fp64 sum rounded to bf16 once */
    double off, all;         /* squared error of the reduction, sum of squares */
    int64_t byte_count;      /* of a cast case: bytes in the result so far */
    void *bound[4];          /* memory that gmm_gtp_bind has received */
    size_t bound_bytes[4];
    cudaGraphExec_t graph[2];
    int32_t graph_id[2];
    const void *place[GMM_GTP_PASSES + 1][LAYERS]; /* addresses of views and gradient buffers, which must not change */
    long allocations;       /* of the context */
    int out_of_memory;            /* 1: allocations fail */
    gmm_status status;
    char text[512];
    double seconds;
} rank;

typedef struct run {
    const gpu_case *c;
    gpu_result *out;
    rendezvous rendezvous, half[2];
    int size;
    rank rank[RANKS];
} run;

static const char *error_text(const rank *r) {
    const char *text = gmm_gtp_last_error(r->gtp);
    return *text ? text : gmm_last_error(r->ctx);
}
#define GO(r, call) \
    do { const gmm_status s_ = (call); if (s_) return failed(r, s_, #call, error_text(r)); } while (0)
#define CUDA(r, call) \
    do { const cudaError_t e_ = (call); if (e_) return failed(r, GMM_E_CUDA, #call, cudaGetErrorString(e_)); } while (0)
static int failed(rank *r, gmm_status s, const char *call, const char *text) {
    if (!r->status) {
        r->status = s;
        snprintf(r->text, sizeof r->text, "%s: %.60s: %.380s", gmm_status_name(s), call, text);
    }
    return 1;
}

/* Counts allocations: after gmm_gtp_bind the runtime makes none. */
static void *counted(void *user, size_t bytes) {
    rank *r = (rank *)user;
    r->allocations++;
    return r->out_of_memory ? NULL : malloc(bytes);
}
static void release(void *user, void *memory) {
    (void)user;
    free(memory);
}

static uint16_t value(uint64_t key, float scale) {
    return gmm_f32_to_bf16(scale * ((float)(mix(key) % 20001) / 10000.0f - 1.0f));
}

static uint16_t token(const gpu_case *c, uint64_t key) {
    return c->integers ? gmm_f32_to_bf16((float)(mix(key) % 3) - 1.0f) : value(key, 1.0f);
}

/* Device memory of the case; memory for NCCL windows comes from ncclMemAlloc. CUDA IPC opens allocations of 2 MiB or
   more. */
static void *case_alloc(rank *r, size_t bytes, int byte) {
    const size_t unit = r->seat.process ? 2 << 20 : 4096;
    void *p = NULL;
    cudaError_t e;
    bytes = (bytes + unit - 1) / unit * unit;
#ifdef HAVE_NCCL
    if (r->c->transport == NCCL_WINDOWS || r->c->transport == NCCL_ENGINES)
        e = ncclMemAlloc(&p, bytes) == ncclSuccess ? cudaSuccess : cudaErrorMemoryAllocation;
    else
#endif
        e = cudaMalloc(&p, bytes);
    if (e == cudaSuccess) e = cudaMemset(p, byte, bytes);
    if (e == cudaSuccess) e = cudaDeviceSynchronize();
    if (e != cudaSuccess || r->block_count == BLOCKS) (void)failed(r, GMM_E_MEMORY, "memory", cudaGetErrorString(e));
    if (r->block_count < BLOCKS) r->blocks[r->block_count++] = p;
    return p;
}
static void case_free(rank *r) {
    while (r->block_count > 0) {
        void *p = r->blocks[--r->block_count];
#ifdef HAVE_NCCL
        if (r->c->transport == NCCL_WINDOWS || r->c->transport == NCCL_ENGINES) (void)ncclMemFree(p);
        else
#endif
            (void)cudaFree(p);
    }
}

static int in_half(const rank *r, int l) { return r->c->halves && r->size > 1 && l % 2; }
static const gmm_shard_plan *plan_of(const rank *r, int l) { return in_half(r, l) ? &r->half_plan : &r->plan; }
static size_t shard_values(const rank *r, int l) {
    return (size_t)plan_of(r, l)->shard_rows * (size_t)r->c->rows;
}
static size_t values_before(const rank *r, int layer) { /* of all experts */
    size_t n = 0;
    for (int l = 0; l < layer; l++) n += (size_t)r->c->experts * shard_values(r, l);
    return n;
}

/* Tokens, output gradients, splits and weights: functions of rank, layer and element index alone. */
static int fill(rank *r) {
    const gpu_case *c = r->c;
    const size_t values = (size_t)c->tokens * (size_t)c->rows;
    uint16_t *host = (uint16_t *)malloc((values + values_before(r, c->layers)) * sizeof *host);
    r->shards = (uint16_t *)case_alloc(r, values_before(r, c->layers) * 2, 0);
    r->first = (uint16_t *)case_alloc(r, values_before(r, c->layers) * 2, 0);
    r->grads = (float *)case_alloc(r, values_before(r, c->layers) * 4, 0xFF);
    r->recomputed = (uint16_t *)case_alloc(r, values * 2, 0xFF);
    r->random = (uint64_t *)case_alloc(r, 4 * sizeof *r->random, 0x11);
    r->recipe = gmm_recipe_of(c->recipe);
    for (int m = 0; m < r->micro; m++) {
        const int who = r->size == 1 ? m : r->index;
        int32_t sizes[EXPERTS] = {0}, left = c->tokens;
        for (int l = 0; l <= c->layers; l++) {
            r->y[m][l] = (uint16_t *)case_alloc(r, values * 2, 0xFF);
            r->dy[m][l] = (uint16_t *)case_alloc(r, values * 2, 0xFF);
        }
        if (r->status) return 1;
        for (size_t i = 0; i < values; i++) host[i] = token(c, i * 64 + (size_t)who);
        CUDA(r, cudaMemcpy(r->y[m][0], host, values * 2, cudaMemcpyHostToDevice));
        for (size_t i = 0; i < values; i++) host[i] = token(c, i * 64 + 32 + (size_t)who);
        CUDA(r, cudaMemcpy(r->dy[m][c->layers], host, values * 2, cudaMemcpyHostToDevice));
        for (int e = 0; e < c->experts; e++) { /* uneven splits, no tokens for the second expert */
            sizes[e] = e == c->experts - 1 ? left : e == 1 ? 0 : (left + who) / 3;
            if (c->zero_rank == who + 1) sizes[e] = 0;
            left -= sizes[e];
        }
        r->sizes[m] = (int32_t *)case_alloc(r, sizeof sizes, 0);
        CUDA(r, cudaMemcpy(r->sizes[m], sizes, sizeof sizes, cudaMemcpyHostToDevice));
    }
    for (int b = 0; b < c->layers * c->experts; b++) {
        const int l = b / c->experts;
        const gmm_shard_plan *p = plan_of(r, l);
        const size_t valid = (size_t)p->valid_rows * (size_t)c->rows;
        const size_t at = values_before(r, l) + (size_t)(b % c->experts) * shard_values(r, l);
        for (size_t i = 0; i < valid; i++)
            host[i] = value(((size_t)(p->row0 * c->rows) + i) * 64 + 63 * 4096 + (size_t)b, 0.2f);
        CUDA(r, cudaMemcpy(r->shards + at, host, valid * 2, cudaMemcpyHostToDevice));
        CUDA(r, cudaMemcpy(r->first + at, host, valid * 2, cudaMemcpyHostToDevice));
    }
    CUDA(r, cudaDeviceSynchronize());
    free(host);
    return 0;
}

static gmm_linear linear_of(const rank *r, int m, gmm_groups *g) {
    gmm_linear d = GMM_ZERO;
    memset(g, 0, sizeof *g);
    g->count = r->c->experts;
    g->capacity = r->c->tokens;
    g->splits = r->sizes[m];
    g->dtype = GMM_I32;
    g->tail = GMM_TAIL_ZERO;
    d.in_features = d.out_features = r->c->rows;
    d.groups = g;
    return d;
}

enum { FWD, DGRAD, WGRAD };
static gmm_status product(rank *r, int op, int m, const gmm_mat *w, uint16_t *x, uint16_t *dy, void *to) {
    gmm_groups g;
    gmm_mat mats[3];
    gmm_grad grad = GMM_ZERO;
    gmm_linear d = linear_of(r, m, &g);
    mats[0] = gmm_mat_packed(GMM_BF16, x);
    mats[1] = gmm_mat_packed(GMM_BF16, dy);
    mats[2] = gmm_mat_packed(GMM_BF16, to);
    if (op == FWD) {
        d.x = &mats[0], d.w = w, d.y = &mats[2];
        return gmm_linear_fwd(r->ctx, &d, r->workspace, r->workspace_bytes, r->compute);
    }
    d.dy = &mats[1];
    if (op == DGRAD) {
        d.w = w, d.dx = &mats[2];
        return gmm_linear_dgrad(r->ctx, &d, r->workspace, r->workspace_bytes, r->compute);
    }
    d.x = &mats[0];
    grad.mat = w; /* the buffer */
    d.dw = &grad;
    return gmm_linear_wgrad(r->ctx, &d, r->workspace, r->workspace_bytes, r->compute);
}

/* The two layers as one MLP, and the operands of its descriptor. */
typedef struct mlp_call {
    gmm_mlp_config config;
    gmm_mlp_quant quant;
    gmm_groups groups;
    gmm_mat x, y, dy, dx;
    gmm_grad dw[2];
    gmm_mlp mlp;
} mlp_call;
static void mlp_of(const rank *r, int m, const gmm_mat *const w[2], const gmm_mat *const dw[2], mlp_call *c) {
    memset(c, 0, sizeof *c);
    (void)linear_of(r, m, &c->groups);
    c->config.hidden = c->config.ffn = r->c->rows;
    c->config.act.kind = GMM_ACT_SILU;
    c->config.recipe = r->c->recipe;
    c->quant.recipe = &r->recipe;
    c->quant.random = r->random;
    c->mlp.quant = r->c->recipe ? &c->quant : NULL;
    c->x = gmm_mat_packed(GMM_BF16, r->y[m][0]);
    c->y = gmm_mat_packed(GMM_BF16, r->y[m][2]);
    c->dy = gmm_mat_packed(GMM_BF16, r->dy[m][2]);
    c->dx = gmm_mat_packed(GMM_BF16, r->dy[m][0]);
    for (int k = 0; k < 2; k++) c->dw[k].mat = dw[k];
    c->mlp.config = &c->config;
    c->mlp.groups = &c->groups;
    c->mlp.x = &c->x, c->mlp.y = &c->y, c->mlp.dy = &c->dy, c->mlp.dx = &c->dx;
    c->mlp.w1 = w[0], c->mlp.w2 = w[1];
    c->mlp.dw1 = &c->dw[0], c->mlp.dw2 = &c->dw[1];
    c->mlp.saved = r->saved[m];
    c->mlp.saved_bytes = r->saved_bytes;
}

/* Creates the runtime object with a domain of all ranks and, if the case has halves, one of this rank's half. */
static int open_object(rank *r, int weights, int bundles) {
    const gpu_case *c = r->c;
    gmm_gtp_config config = GMM_ZERO;
    gmm_gtp_domain d = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    size_t bytes = 0;
    config.weights = weights;
    config.bundles = bundles;
    config.chains = 3;
    config.domains = r->domains = 1 + (c->halves && r->size > 1);
    config.graphs = 2;
    config.timeout_ms = 3000;
    config.ctx = r->ctx;
    if (gmm_gtp_query(&config, &bytes, &error)) return failed(r, error.status, "query", error.text);
    r->memory = calloc(1, bytes);
    if (gmm_gtp_init(r->memory, bytes, &config, &r->gtp, &error)) return failed(r, error.status, "init", error.text);
    d.wire = c->wire;
    if (r->size > 1) d.gather = &r->comm[0], d.reduce = &r->comm[1];
    d.gather_stream = r->side[0];
    d.reduce_stream = r->side[1];
    d.reduction = c->reduction;
    d.synchronous = c->synchronous;
    GO(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain));
    if (r->domains == 2) {
        d.gather = &r->comm[2], d.reduce = &r->comm[3];
        GO(r, gmm_gtp_add_domain(r->gtp, &d, &r->half_domain));
    }
    return 0;
}
/* Allocates and binds the memory of the sealed object. */
static int bind_memory(rank *r) {
    for (int k = 0; k < r->domains; k++) {
        const int32_t id = k ? r->half_domain : r->domain;
        gmm_gtp_need need = GMM_ZERO;
        size_t bytes[2];
        void *block[2];
        GO(r, gmm_gtp_memory_need(r->gtp, id, &need));
        bytes[0] = (need.gather_bytes + 4095) / 4096 * 4096;
        bytes[1] = (need.reduce_bytes + 4095) / 4096 * 4096;
        for (int i = 0; i < 2; i++) block[i] = bytes[i] ? case_alloc(r, bytes[i], 0xFF) : NULL;
        if (r->status) return 1;
        GO(r, gmm_gtp_bind(r->gtp, id, block[0], bytes[0], block[1], bytes[1]));
        for (int i = 0; i < 2; i++) {
            r->bound[2 * k + i] = block[i];
            r->bound_bytes[2 * k + i] = bytes[i];
        }
    }
    return 0;
}

static int declare(rank *r) {
    const gpu_case *c = r->c;
    gmm_shard shard = GMM_ZERO, half_seat;
    gmm_error error = GMM_ZERO;
    if (open_object(r, c->layers * c->experts, c->layers)) return 1;
    shard.dtype = GMM_BF16;
    shard.rows = shard.cols = c->rows;
    shard.gtp_size = r->size;
    shard.gtp_rank = r->index;
    half_seat = shard;
    half_seat.gtp_size = r->size > 1 ? r->size / 2 : 1;
    half_seat.gtp_rank = r->half_seat.rank;
    if (gmm_gtp_plan(&shard, &r->plan, &error) || gmm_gtp_plan(&half_seat, &r->half_plan, &error))
        return failed(r, error.status, "plan", error.text);
    if (fill(r)) return 1;
    for (int l = 0; l < c->layers; l++) {
        for (int e = 0; e < c->experts; e++) {
            const size_t at = values_before(r, l) + (size_t)e * shard_values(r, l);
            gmm_gtp_weight w = GMM_ZERO;
            w.expert = e;
            w.name = "weight";
            w.shard = in_half(r, l) ? &half_seat : &shard;
            w.data[0] = r->shards + at;
            w.main_grad = r->grads + at;
            w.main_grad_dtype = GMM_F32;
            GO(r, gmm_gtp_add_weight(r->gtp, &w, &r->ids[l][e]));
        }
        GO(r, gmm_gtp_add_bundle(r->gtp, in_half(r, l) ? r->half_domain : r->domain, r->ids[l], c->experts, "layer",
                                 &r->bundle[l]));
    }
    for (int pass = 0; pass < GMM_GTP_PASSES; pass++) {
        gmm_gtp_chain chain = GMM_ZERO;
        int32_t list[LAYERS];
        if (pass == GMM_GTP_RECOMPUTE && !c->recompute) continue;
        for (int l = 0; l < c->layers; l++) list[l] = r->bundle[pass == GMM_GTP_FORWARD ? l : c->layers - 1 - l];
        chain.pass = (gmm_gtp_pass)pass;
        chain.bundles = list;
        chain.count = c->layers;
        chain.prefetch = c->prefetch;
        chain.together = c->together;
        chain.held = c->mlp ? 2 : 1;
        chain.captured = c->replay > 0;
        GO(r, gmm_gtp_add_chain(r->gtp, &chain, &r->chain[pass]));
    }
    GO(r, gmm_gtp_seal(r->gtp));
    GO(r, gmm_gtp_follow(r->gtp, r->chain[GMM_GTP_FORWARD], r->chain[GMM_GTP_BACKWARD]));
    {
        gmm_groups g;
        void *table[EXPERTS] = {NULL}; /* a single rank reads its shards in place */
        gmm_mat x = gmm_mat_packed(GMM_BF16, NULL), f = gmm_mat_packed(c->wire ? c->wire : GMM_F32, NULL);
        const gmm_mat w = r->size > 1 ? x : gmm_mat_table(GMM_BF16, table, (uint32_t)GMM_MAT_TABLE_ON_HOST);
        gmm_grad grad = GMM_ZERO;
        gmm_linear lin = linear_of(r, 0, &g);
        gmm_info info = GMM_ZERO;
        for (int e = 0; e < c->experts; e++) table[e] = r->shards;
        grad.mat = &f;
        lin.x = lin.y = lin.dy = lin.dx = &x;
        lin.w = &w;
        lin.dw = &grad;
        for (int op = GMM_OP_LINEAR_FWD; op <= GMM_OP_LINEAR_WGRAD; op++) {
            GO(r, gmm_linear_query(r->ctx, (gmm_op)op, &lin, &info));
            r->workspace_bytes = info.workspace_bytes > r->workspace_bytes ? info.workspace_bytes : r->workspace_bytes;
        }
        for (int op = GMM_OP_MLP_FWD; op <= GMM_OP_MLP_BWD && c->mlp; op++) {
            const gmm_mat *const ws[2] = {&w, &w}, *const dws[2] = {&f, &f};
            mlp_call call;
            mlp_of(r, 0, ws, dws, &call);
            GO(r, gmm_mlp_query(r->ctx, (gmm_op)op, &call.mlp, &info));
            r->workspace_bytes = info.workspace_bytes > r->workspace_bytes ? info.workspace_bytes : r->workspace_bytes;
            r->saved_bytes = info.saved_bytes > r->saved_bytes ? info.saved_bytes : r->saved_bytes;
        }
        for (int m = 0; m < r->micro && r->saved_bytes; m++) r->saved[m] = case_alloc(r, r->saved_bytes, 0xFF);
        r->workspace = case_alloc(r, r->workspace_bytes + 256, 0xFF);
    }
    if (r->status) return 1;
    if (c->transport == NCCL_ENGINES) { /* copies by copy engines need windows on both sides */
        const size_t size = values_before(r, c->layers) * 2;
        GO(r, r->comm[0].window_add(r->comm[0].self, r->shards, (size + 4095) / 4096 * 4096, &r->window[0]));
    }
    return bind_memory(r);
}

/* Synchronizes the stream while polling the collectives, as a program should. */
static int wait_polled(rank *r) {
    const struct timespec pause = {0, 50000};
    const double begin = gtp_seconds();
    for (;;) {
        const cudaError_t e = cudaStreamQuery(r->compute);
        if (e == cudaSuccess) return 0;
        if (e != cudaErrorNotReady) return failed(r, GMM_E_CUDA, "settle", cudaGetErrorString(e));
        r->seconds = gtp_seconds() - begin;
        GO(r, gmm_gtp_poll(r->gtp));
        (void)nanosleep(&pause, NULL);
    }
}

/* Checks that a view has the address that it had before, since graphs read it there. */
static int check_address(rank *r, int what, int l, const gmm_gtp_view *v) {
    const void *at = v->mat.table ? v->mat.table[0] : v->mat.data;
    if (r->place[what][l] && r->place[what][l] != at) return failed(r, GMM_E_STATE, "view", "its address has changed");
    r->place[what][l] = at;
    return 0;
}

static int forward(rank *r, int m) {
    for (int l = 0; l < r->c->layers; l++) {
        gmm_gtp_view v = GMM_ZERO;
        GO(r, gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute, &v));
        if (check_address(r, GMM_GTP_FORWARD, l, &v)) return 1;
        GO(r, product(r, FWD, m, &v.mat, r->y[m][l], NULL, r->y[m][l + 1]));
        GO(r, gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute));
    }
    return 0;
}
static int backward(rank *r, int m) {
    const gpu_case *c = r->c;
    for (int l = c->layers - 1; l >= 0; l--) {
        const int idle = c->zero_rank == (r->size == 1 ? m : r->index) + 1;
        gmm_gtp_gradient g = GMM_ZERO;
        gmm_gtp_view v = GMM_ZERO, dw = GMM_ZERO;
        if (c->recompute) {
            GO(r, gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_RECOMPUTE, r->compute, &v));
            GO(r, product(r, FWD, m, &v.mat, r->y[m][l], NULL, r->recomputed));
            GO(r, gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_RECOMPUTE, r->compute));
            memset(&v, 0, sizeof v);
        }
        GO(r, gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_BACKWARD, r->compute, &v));
        if (check_address(r, GMM_GTP_BACKWARD, l, &v)) return 1;
        GO(r, product(r, DGRAD, m, &v.mat, NULL, r->dy[m][l + 1], r->dy[m][l]));
        GO(r, gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_BACKWARD, r->compute));
        if (!idle) {
            GO(r, gmm_gtp_wgrad(r->gtp, r->bundle[l], r->compute, &dw));
            if (check_address(r, GMM_GTP_PASSES, l, &dw)) return 1;
            GO(r, product(r, WGRAD, m, &dw.mat, r->y[m][l], r->dy[m][l + 1], NULL));
        }
        g.scale = c->scale != 0 ? c->scale : 1;
        g.zero = idle;
        g.add = m == 0 ? GMM_GTP_SET : GMM_GTP_ADD;
        GO(r, gmm_gtp_submit(r->gtp, r->bundle[l], &g, r->compute));
    }
    return 0;
}
/* Forward and backward of the MLP; both weights are acquired at a time. */
static int through_mlp(rank *r, int m) {
    for (int pass = GMM_GTP_FORWARD; pass <= GMM_GTP_BACKWARD; pass++) {
        gmm_gtp_view v[2], dw[2];
        const gmm_mat *const w[2] = {&v[0].mat, &v[1].mat}, *const to[2] = {&dw[0].mat, &dw[1].mat};
        mlp_call call;
        memset(v, 0, sizeof v);
        memset(dw, 0, sizeof dw);
        for (int i = 0; i < 2; i++) {
            const int k = pass ? 1 - i : i;
            GO(r, gmm_gtp_acquire(r->gtp, r->bundle[k], (gmm_gtp_pass)pass, r->compute, &v[k]));
            if (pass) GO(r, gmm_gtp_wgrad(r->gtp, r->bundle[k], r->compute, &dw[k]));
        }
        mlp_of(r, m, w, to, &call);
        GO(r, (pass ? gmm_mlp_bwd : gmm_mlp_fwd)(r->ctx, &call.mlp, r->workspace, r->workspace_bytes, r->compute));
        for (int i = 0; i < 2; i++) {
            const int k = pass ? 1 - i : i;
            gmm_gtp_gradient g = GMM_ZERO;
            GO(r, gmm_gtp_release(r->gtp, r->bundle[k], (gmm_gtp_pass)pass, r->compute));
            g.scale = 1;
            g.add = m == 0 ? GMM_GTP_SET : GMM_GTP_ADD;
            if (pass) GO(r, gmm_gtp_submit(r->gtp, r->bundle[k], &g, r->compute));
        }
    }
    return 0;
}
/* Subtracts main_grad from the shards and publishes them. Weights decay towards their initial values, so that after
   thousands of steps they are neither infinite nor zero. */
static int optimize(rank *r) {
    const gpu_case *c = r->c;
    GO(r, gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute));
    for (int i = 0; i < 2 * r->domains && c->poison; i++)
        if (r->bound[i]) CUDA(r, cudaMemsetAsync(r->bound[i], 0xFF, r->bound_bytes[i], r->compute));
    for (int l = 0; l < c->layers; l++) {
        gmm_accumulation d = GMM_ZERO;
        const size_t at = values_before(r, l);
        const gmm_mat x = gmm_mat_packed(GMM_F32, r->grads + at), y = gmm_mat_packed(GMM_BF16, r->shards + at);
        const gmm_mat first = gmm_mat_packed(GMM_BF16, r->first + at);
        d.count = 1;
        d.rows = plan_of(r, l)->shard_rows * c->experts;
        d.cols = c->rows;
        d.y = &y;
        d.x = &first;
        d.scale = 0.05f;
        d.beta = 0.95f;
        GO(r, gmm_accumulate(r->ctx, &d, NULL, 0, r->compute));
        d.x = &x;
        d.scale = c->rate != 0 ? -c->rate : -0.0005f;
        d.beta = 1;
        GO(r, gmm_accumulate(r->ctx, &d, NULL, 0, r->compute));
        GO(r, gmm_gtp_publish(r->gtp, r->ids[l], c->experts, r->compute));
    }
    return 0;
}

static int captured(rank *r, int which, int parts) {
    cudaGraph_t graph = NULL;
    CUDA(r, cudaStreamBeginCapture(r->compute, cudaStreamCaptureModeThreadLocal));
    GO(r, gmm_gtp_capture_begin(r->gtp, r->compute, &r->graph_id[which]));
    if ((parts & 1) && forward(r, 0)) return 1;
    if ((parts & 2) && backward(r, 0)) return 1;
    if (parts & 2) GO(r, gmm_gtp_fence(r->gtp, GMM_GTP_GRADIENTS, r->compute));
    GO(r, gmm_gtp_capture_end(r->gtp, r->compute));
    CUDA(r, cudaStreamEndCapture(r->compute, &graph));
    CUDA(r, cudaGraphInstantiate(&r->graph[which], graph, 0));
    CUDA(r, cudaGraphDestroy(graph));
    return 0;
}
/* main_grad is unchanged: neither a warm-up nor a capture adds to it. */
static int main_grad_unchanged(rank *r) {
    const size_t bytes = values_before(r, r->c->layers) * sizeof *r->grads;
    unsigned char *host = (unsigned char *)malloc(bytes);
    const cudaError_t e = cudaMemcpy(host, r->grads, bytes, cudaMemcpyDeviceToHost);
    size_t i = 0;
    while (i < bytes && host[i] == 0xFF) i++;
    free(host);
    if (e != cudaSuccess) return failed(r, GMM_E_CUDA, "main_grad", cudaGetErrorString(e));
    return i < bytes ? failed(r, GMM_E_STATE, "main_grad", "a dry run or a capture has changed it") : 0;
}
static int train(rank *r) {
    const gpu_case *c = r->c;
    const long before = r->allocations;
    if (c->replay) { /* a dry run, which changes no gradient, then the capture */
        GO(r, gmm_gtp_dry_run(r->gtp, 1));
        if (forward(r, 0) || backward(r, 0) || wait_polled(r)) return 1;
        GO(r, gmm_gtp_dry_run(r->gtp, 0));
        if (c->replay == 1 ? captured(r, 0, 3) : captured(r, 0, 1) || captured(r, 1, 2)) return 1;
        if (main_grad_unchanged(r)) return 1;
    }
    for (int s = 0; s < c->steps; s++) {
        if (c->silent && r->index == 1 && s == 1) return 0;
        for (int i = 0; i < c->replay; i++) {
            GO(r, gmm_gtp_pre_replay(r->gtp, r->graph_id[i], r->compute));
            CUDA(r, cudaGraphLaunch(r->graph[i], r->compute));
            GO(r, gmm_gtp_post_replay(r->gtp, r->graph_id[i], r->compute));
        }
        for (int m = 0; m < r->micro && !c->replay; m++)
            if (c->mlp ? through_mlp(r, m) : forward(r, m) || backward(r, m)) return 1;
        if (optimize(r)) return 1;
        if (s % 50 == 49 || c->silent)
            if (wait_polled(r)) return 1;
    }
    if (r->allocations != before) return failed(r, GMM_E_MEMORY, "train", "something was allocated");
    return wait_polled(r);
}

/* Bytes of a quantized bundle of c->experts weights, as functions of their position, and the maximum of values whose
   largest is on a different rank for each. Few shards are separate allocations, many are parts of one. */
enum { F_FEW = 3, F_MOST = 70, F_ROWS = 640, F_COLS = 384, F_VALUES = 3000 };
static unsigned char byte_of(int e, int64_t row, int64_t i) {
    return (unsigned char)mix((uint64_t)(e * 8192 + row) * 8192 + (uint64_t)i);
}
static int formats(rank *r) {
    const int count = r->c->experts;
    gmm_gtp_view v = GMM_ZERO;
    gmm_shard shard = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    int64_t line, part[2]; /* bytes of scales of 128 rows; of a shard's codes and scales */
    unsigned char *host = (unsigned char *)calloc(1, 1 << 21);
    float *values = (float *)case_alloc(r, F_VALUES * sizeof *values, 0);
    char *block[2] = {NULL, NULL};
    int32_t ids[F_MOST], bundle;
    if (open_object(r, count, 1)) return 1;
    shard.dtype = GMM_E4M3;
    shard.scaling = GMM_SCALING_128X128;
    shard.rows = F_ROWS;
    shard.cols = F_COLS;
    shard.gtp_size = r->size;
    shard.gtp_rank = r->index;
    if (gmm_gtp_plan(&shard, &r->plan, &error)) return failed(r, error.status, "plan", error.text);
    part[0] = r->plan.shard_data_bytes[0];
    part[1] = r->plan.shard_scale_bytes[0];
    line = part[1] / (r->plan.shard_rows / 128);
    for (int k = 0; k < 2 && count > F_FEW; k++) block[k] = (char *)case_alloc(r, (size_t)(count * part[k]), 0xFF);
    for (int e = 0; e < count; e++) {
        gmm_gtp_weight w = GMM_ZERO;
        w.expert = e;
        w.shard = &shard;
        w.data[0] = count > F_FEW ? block[0] + e * part[0] : case_alloc(r, (size_t)part[0], 0xFF);
        w.scale[0] = count > F_FEW ? block[1] + e * part[1] : case_alloc(r, (size_t)part[1], 0xFF);
        if (r->status) return 1;
        for (int64_t i = 0; i < part[0]; i++) host[i] = byte_of(e, r->plan.row0 + i / F_COLS, i % F_COLS);
        CUDA(r, cudaMemcpy(w.data[0], host, (size_t)part[0], cudaMemcpyHostToDevice));
        for (int64_t i = 0; i < part[1]; i++) host[i] = byte_of(e, 4096 + r->plan.row0 / 128 + i / line, i % line);
        CUDA(r, cudaMemcpy(w.scale[0], host, (size_t)part[1], cudaMemcpyHostToDevice));
        GO(r, gmm_gtp_add_weight(r->gtp, &w, &ids[e]));
    }
    for (int i = 0; i < F_VALUES; i++) ((float *)(void *)host)[i] = i % r->size == r->index ? (float)i : -1.0f;
    CUDA(r, cudaMemcpy(values, host, F_VALUES * sizeof *values, cudaMemcpyHostToDevice));
    GO(r, gmm_gtp_add_bundle(r->gtp, r->domain, ids, count, "quantized", &bundle));
    GO(r, gmm_gtp_seal(r->gtp));
    if (bind_memory(r)) return 1;
    GO(r, gmm_gtp_amax(r->gtp, r->domain, values, F_VALUES, r->compute));
    GO(r, gmm_gtp_acquire(r->gtp, bundle, GMM_GTP_FORWARD, r->compute, &v));
    GO(r, gmm_gtp_release(r->gtp, bundle, GMM_GTP_FORWARD, r->compute));
    if (wait_polled(r)) return 1;
    CUDA(r, cudaMemcpy(host, values, F_VALUES * sizeof *values, cudaMemcpyDeviceToHost));
    for (int i = 0; i < F_VALUES; i++)
        if (((float *)(void *)host)[i] != (float)i) return failed(r, GMM_E_ARG, "formats", "a maximum is wrong");
    for (int e = 0; e < count; e++) {
        const int64_t data = r->plan.padded_rows * F_COLS, scales = r->plan.padded_rows / 128 * line;
        const char *codes = v.mat.table ? (const char *)v.mat.table[e] : (char *)v.mat.data + e * v.mat.group_stride;
        const char *factors = v.mat.scale_table ? (const char *)v.mat.scale_table[e]
                                                : (char *)v.mat.scale + e * scales;
        CUDA(r, cudaMemcpy(host, codes, (size_t)data, cudaMemcpyDeviceToHost));
        for (int64_t i = 0; i < data; i++)
            if (host[i] != byte_of(e, i / F_COLS, i % F_COLS))
                return failed(r, GMM_E_ARG, "formats", "a gathered byte is wrong");
        CUDA(r, cudaMemcpy(host, factors, (size_t)scales, cudaMemcpyDeviceToHost));
        for (int64_t i = 0; i < scales; i++)
            if (host[i] != byte_of(e, 4096 + i / line, i % line))
                return failed(r, GMM_E_ARG, "formats", "a gathered scale is wrong");
    }
    free(host);
    return 0;
}

/* One reduction of random bf16 gradients, compared with their sum in fp64: the relative error, and whether every value
   is that sum rounded to bf16 once. */
enum { SUM_COUNT = 2, SUM_ROWS = 240, SUM_COLS = 128 };
static int sums(rank *r) {
    const int64_t values = (int64_t)SUM_ROWS * SUM_COLS;
    uint16_t *host = (uint16_t *)malloc((size_t)values * sizeof *host);
    uint16_t *from = (uint16_t *)case_alloc(r, SUM_COUNT * (size_t)values * sizeof *from, 0xFF);
    float *got = (float *)malloc((size_t)values * sizeof *got), *grads;
    const gmm_mat mat = gmm_mat_packed(GMM_BF16, from);
    gmm_gtp_gradient g = GMM_ZERO;
    gmm_shard shard = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    int32_t ids[SUM_COUNT], bundle;
    int64_t part;
    cudaError_t e = cudaSuccess;
    if (open_object(r, SUM_COUNT, 1)) return 1;
    shard.dtype = GMM_BF16;
    shard.rows = SUM_ROWS;
    shard.cols = SUM_COLS;
    shard.gtp_size = r->size;
    shard.gtp_rank = r->index;
    if (gmm_gtp_plan(&shard, &r->plan, &error)) return failed(r, error.status, "plan", error.text);
    part = r->plan.shard_rows * SUM_COLS;
    grads = (float *)case_alloc(r, SUM_COUNT * (size_t)part * sizeof *grads, 0xFF);
    for (int k = 0; k < SUM_COUNT; k++) {
        gmm_gtp_weight w = GMM_ZERO;
        w.expert = k;
        w.shard = &shard;
        w.data[0] = case_alloc(r, (size_t)part * 2, 0);
        w.main_grad = grads + k * part;
        w.main_grad_dtype = GMM_F32;
        for (int64_t i = 0; i < values; i++)
            host[i] = value((uint64_t)(i * SUM_COUNT + k) * RANKS + (uint64_t)r->index, 1.0f);
        if (r->status) return 1;
        CUDA(r, cudaMemcpy(from + k * values, host, (size_t)values * sizeof *host, cudaMemcpyHostToDevice));
        GO(r, gmm_gtp_add_weight(r->gtp, &w, &ids[k]));
    }
    GO(r, gmm_gtp_add_bundle(r->gtp, r->domain, ids, SUM_COUNT, "gradients", &bundle));
    GO(r, gmm_gtp_seal(r->gtp));
    if (bind_memory(r)) return 1;
    g.scale = r->c->scale;
    g.add = GMM_GTP_SET;
    g.from = &mat;
    GO(r, gmm_gtp_submit(r->gtp, bundle, &g, r->compute));
    GO(r, gmm_gtp_fence(r->gtp, GMM_GTP_GRADIENTS, r->compute));
    if (wait_polled(r)) return 1;
    r->rounded_once = 1;
    for (int k = 0; k < SUM_COUNT && e == cudaSuccess; k++) {
        const int64_t valid = r->plan.valid_rows * SUM_COLS, first = r->plan.row0 * SUM_COLS;
        e = cudaMemcpy(got, grads + k * part, (size_t)part * sizeof *got, cudaMemcpyDeviceToHost);
        for (int64_t i = 0; i < part && e == cudaSuccess; i++) {
            double want = 0;
            for (int who = 0; i < valid && who < r->size; who++)
                want += gmm_bf16_to_f32(value((uint64_t)((first + i) * SUM_COUNT + k) * RANKS + (uint64_t)who, 1.0f));
            r->rounded_once &= got[i] == g.scale * gmm_bf16_to_f32(gmm_f32_to_bf16((float)want));
            want *= g.scale;
            r->off += (got[i] - want) * (got[i] - want);
            r->all += want * want;
        }
    }
    free(host);
    free(got);
    return e == cudaSuccess ? 0 : failed(r, GMM_E_CUDA, "sums", cudaGetErrorString(e));
}

/* Quantizes two weights, whose last rows are a hundred times as large as the first, to a format whose shards need no
   padding, and stores the gathered views of both passes: codes, scales and amaxes. */
enum { CAST_COUNT = 2, CAST_ROWS = 1024, CAST_COLS = 384 };
#define F(dtype_, scaling_, ...) {.dtype = GMM_##dtype_, .scaling = GMM_SCALING_##scaling_, __VA_ARGS__}
static const gmm_format cast_to[] = {F(E4M3, TENSOR, .pow2 = 0), F(E4M3, 128X128, .pow2 = 1), F(E4M3, 1X128, .pow2 = 1),
                                     F(E4M3, MX32, .pow2 = 0), F(E2M1, NV16, .pow2 = 0)};
static const char *const cast_name[] = {"fp8", "128x128", "1x128", "mxfp8", "nvfp4"};
#undef F
static int append_bytes(rank *r, const void *device, int64_t bytes) {
    unsigned char *to = r->run->out->bytes + (int64_t)r->index * CAST_BYTES + r->byte_count;
    r->byte_count += bytes;
    if (r->byte_count > CAST_BYTES) return failed(r, GMM_E_MEMORY, "cast", "more than CAST_BYTES");
    CUDA(r, cudaMemcpy(to, device, (size_t)bytes, cudaMemcpyDeviceToHost));
    return 0;
}
static int cast(rank *r) {
    const gmm_format *f = &cast_to[r->c->cast - 1];
    gmm_gtp_quantization q = GMM_ZERO;
    gmm_shard shard = GMM_ZERO, one;
    gmm_shard_plan whole = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    uint16_t *host;
    void *from[CAST_COUNT];
    float *amax = (float *)case_alloc(r, CAST_COUNT * sizeof *amax, 0xFF);
    int32_t ids[CAST_COUNT], bundle;
    if (open_object(r, CAST_COUNT, 1)) return 1;
    shard.dtype = f->dtype;
    shard.scaling = f->scaling;
    shard.rows = CAST_ROWS;
    shard.cols = CAST_COLS;
    one = shard;
    shard.gtp_size = r->size;
    shard.gtp_rank = r->index;
    if (gmm_gtp_plan(&shard, &r->plan, &error) || gmm_gtp_plan(&one, &whole, &error))
        return failed(r, error.status, "plan", error.text);
    if (r->plan.pad) return failed(r, GMM_E_ARG, "plan", "padding: the bytes would lie elsewhere");
    host = (uint16_t *)malloc((size_t)(r->plan.shard_rows * CAST_COLS) * sizeof *host);
    for (int e = 0; e < CAST_COUNT; e++) {
        const size_t values = (size_t)(r->plan.shard_rows * CAST_COLS);
        gmm_gtp_weight w = GMM_ZERO;
        for (size_t i = 0; i < values; i++) {
            const uint64_t place = (uint64_t)(r->plan.row0 * CAST_COLS) + i;
            host[i] = value(place * 8 + (uint64_t)e, place / CAST_COLS >= CAST_ROWS * 7 / 8 ? 100.0f : 1.0f);
        }
        from[e] = case_alloc(r, values * 2, 0);
        w.expert = e;
        w.shard = &shard;
        w.format = f;
        if (f->scaling == GMM_SCALING_NV16) w.amax = amax + e;
        for (int k = 0; k < 2; k++) {
            if (r->plan.shard_data_bytes[k]) w.data[k] = case_alloc(r, (size_t)r->plan.shard_data_bytes[k], 0xFF);
            if (r->plan.shard_scale_bytes[k]) w.scale[k] = case_alloc(r, (size_t)r->plan.shard_scale_bytes[k], 0xFF);
        }
        if (r->status || cudaMemcpy(from[e], host, values * 2, cudaMemcpyHostToDevice) != cudaSuccess) {
            free(host);
            return failed(r, GMM_E_CUDA, "cast", "no memory");
        }
        GO(r, gmm_gtp_add_weight(r->gtp, &w, &ids[e]));
    }
    free(host);
    GO(r, gmm_gtp_add_bundle(r->gtp, r->domain, ids, CAST_COUNT, "quantized", &bundle));
    GO(r, gmm_gtp_seal(r->gtp));
    if (bind_memory(r)) return 1;
    q.dtype = GMM_BF16;
    q.from = (const void *const *)from;
    GO(r, gmm_gtp_quantize(r->gtp, ids, CAST_COUNT, &q, r->compute));
    for (int pass = GMM_GTP_FORWARD; pass <= GMM_GTP_BACKWARD; pass++) {
        gmm_gtp_view v = GMM_ZERO;
        const gmm_mat *m = pass == GMM_GTP_BACKWARD ? NULL : &v.mat;
        GO(r, gmm_gtp_acquire(r->gtp, bundle, (gmm_gtp_pass)pass, r->compute, &v));
        if (!m) m = v.mat.columnwise;
        if (wait_polled(r)) return 1;
        for (int e = 0; e < CAST_COUNT; e++) {
            const int64_t data = whole.gather_data_bytes[pass], scales = whole.gather_scale_bytes[pass];
            if (append_bytes(r, m->table ? (const char *)m->table[e]
                                         : (const char *)m->data + e * m->group_stride * gmm_dtype_bits(f->dtype) / 8,
                             data) ||
                append_bytes(r, m->scale_table ? (const char *)m->scale_table[e] : (const char *)m->scale + e * scales,
                             scales))
                return 1;
        }
        if (m->amax && append_bytes(r, m->amax, CAST_COUNT * (int64_t)sizeof(float))) return 1;
        GO(r, gmm_gtp_release(r->gtp, bundle, (gmm_gtp_pass)pass, r->compute));
    }
    return wait_polled(r);
}

/* Copies this rank's logical rows into the result. */
static int report(rank *r) {
    const gpu_case *c = r->c;
    const size_t whole = (size_t)c->rows * (size_t)c->rows, values = (size_t)c->tokens * (size_t)c->rows;
    gpu_result *out = r->run->out;
    for (int b = 0; b < c->layers * c->experts; b++) {
        const int l = b / c->experts;
        const size_t valid = (size_t)plan_of(r, l)->valid_rows * (size_t)c->rows, rest = shard_values(r, l) - valid;
        const size_t shard = values_before(r, l) + (size_t)(b % c->experts) * shard_values(r, l);
        const size_t to = (size_t)b * whole + (size_t)(plan_of(r, l)->row0 * c->rows);
        float pad[4096], *grads = in_half(r, l) && r->index >= r->size / 2 ? out->others : out->grads;
        CUDA(r, cudaMemcpy(out->weights + to, r->shards + shard, valid * 2, cudaMemcpyDeviceToHost));
        CUDA(r, cudaMemcpy(grads + to, r->grads + shard, valid * 4, cudaMemcpyDeviceToHost));
        if (rest > 4096) return failed(r, GMM_E_ARG, "report", "much padding");
        CUDA(r, cudaMemcpy(pad, r->grads + shard + valid, rest * 4, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < rest; i++)
            if (pad[i] != 0) return failed(r, GMM_E_ARG, "report", "the gradient of padding is not zero");
    }
    for (int m = 0; m < r->micro; m++)
        CUDA(r, cudaMemcpy(r->run->out->outputs + (size_t)(r->size == 1 ? m : r->index) * values, r->y[m][c->layers],
                           values * 2, cudaMemcpyDeviceToHost));
    if (r->index == 0) GO(r, gmm_gtp_statistics_of(r->gtp, &r->run->out->stats));
    return 0;
}

/* -------------------------------------------------------------------------------------------- Communicators --- */

/* NCCL communicators take seconds to create, so all cases share them: two for each transport and rank, and two for each
   half. */
#ifdef HAVE_NCCL
static ncclComm_t nccl[VIAS][4][RANKS];
/* number of ranks, 0 = none; nccl_halved: 1 if those of the halves exist too */
static int nccl_made[VIAS], nccl_halved[VIAS];

static int nccl_start(rank *r, const ncclUniqueId *id) {
    for (int k = 0; k < 2; k++) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        ncclResult_t e;
        config.CTAPolicy = r->c->transport == NCCL_ENGINES ? NCCL_CTA_POLICY_ZERO : NCCL_CTA_POLICY_DEFAULT;
        e = ncclCommInitRankConfig(&nccl[r->c->transport][k][r->index], r->size, id[k], r->index, &config);
        if (e != ncclSuccess) return failed(r, GMM_E_COMM, "ncclCommInitRankConfig", ncclGetErrorString(e));
    }
    return 0;
}
static ncclUniqueId nccl_id[2];
#endif

static int connect_ranks(rank *r) {
    gmm_error error = GMM_ZERO;
    gmm_status s = GMM_OK;
    for (int k = 0; k < (r->c->halves ? 4 : 2) && !s && r->c->transport != ALONE; k++) {
        if (r->c->transport == PEERS) {
            gmm_peers_config config = GMM_ZERO;
            seat *at = k < 2 ? &r->seat : &r->half_seat;
            config.rank = at->rank;
            config.size = k < 2 ? r->size : r->size / 2;
            config.processes = at->process != NULL;
            config.ctx = r->ctx;
            config.exchange = host_allgather;
            config.user = at;
            s = gmm_peers_open(&config, &r->comm[k], &error);
        } else {
#ifdef HAVE_NCCL
            gmm_nccl_config config = GMM_ZERO;
            ncclComm_t *comm = &nccl[r->c->transport][k][r->index];
            if (k == 0 && nccl_made[r->c->transport] != r->size && nccl_start(r, nccl_id)) return 1;
            if (k >= 2 && !nccl_halved[r->c->transport] &&
                ncclCommSplit(nccl[r->c->transport][k - 2][r->index], r->index / (r->size / 2), r->index, comm, NULL))
                return failed(r, GMM_E_COMM, "ncclCommSplit", "failed");
            config.comm = *comm;
            config.ctx = r->ctx;
            config.windows = r->c->transport != NCCL && (k == 0 || r->c->reduction == GMM_GTP_REDUCE_EXCHANGE);
            s = gmm_nccl_open(&config, &r->comm[k], &error);
#endif
        }
    }
    return s ? failed(r, s, "communicator", error.text) : 0;
}

/* One rank's communicator fails, or times out while another rank is slow: all ranks get the error, and no stream
   hangs. */
enum { FAULT_BYTES = 4 << 20 };
static int drained(rank *r) {
    const double begin = gtp_seconds();
    cudaError_t e;
    while ((e = cudaStreamQuery(r->compute)) == cudaErrorNotReady && gtp_seconds() - begin < 8) { }
    return e == cudaSuccess ? 0 : failed(r, GMM_E_CUDA, "a stream hangs", cudaGetErrorString(e));
}
static int expect_error(rank *r, gmm_status status, const char *text) {
    gmm_error error = GMM_ZERO;
    const gmm_status s = r->comm[0].poll(r->comm[0].self, &error);
    if (s == status && strstr(error.text, text)) return 0;
    return failed(r, GMM_E_STATE, "poll", error.text[0] ? error.text : gmm_status_name(s));
}
static int faults(rank *r) {
    const int late = r->index == 1;
    const struct timespec pause = {0, 300000000};
    gmm_comm *c = &r->comm[0];
    char mine = 0, all[RANKS], *recv = (char *)case_alloc(r, FAULT_BYTES, 0);
    char *send = (char *)case_alloc(r, FAULT_BYTES, r->index);
    void *window = NULL;
    gmm_status s;
    if (r->status) return 1;
    if (late && r->c->fault == FAILED_WINDOW) c->give_up(c->self, "on trial");
    s = c->window_add(c->self, recv, FAULT_BYTES - (late && r->c->fault == OTHER_SIZE ? 4096 : 0), &window);
    if (r->c->fault != GIVEN_UP) {
        if (s != GMM_E_COMM || window) return failed(r, GMM_E_STATE, "window_add", gmm_status_name(s));
        return expect_error(r, GMM_E_COMM, r->c->fault == OTHER_SIZE ? "size" : late ? "on trial" : "rank 1 of");
    }
    if (s) return failed(r, s, "window_add", "failed");
    for (int i = 0; i < 4 && late; i++) (void)nanosleep(&pause, NULL);
    if (c->all_gather(c->self, send, recv, FAULT_BYTES / RANKS, r->compute)) return failed(r, GMM_E_COMM, "gather", "");
    if (r->index == 0) {
        (void)nanosleep(&pause, NULL);
        if (expect_error(r, GMM_OK, "")) return 1;
        c->give_up(c->self, "on trial");
    }
    if (drained(r) || expect_error(r, GMM_E_COMM, r->index ? "rank 0 of" : "on trial")) return 1;
    return host_allgather(&r->seat, &mine, all, 1) ? failed(r, GMM_E_COMM, "meet", "") : 0;
}

/* Whether this is the silent rank of the case. */
static int is_silent_rank(const rank *r) { return r->c->silent && r->index == 1; }
static int program(rank *r) {
    if (r->c->formats) return formats(r);
    if (r->c->sums) return sums(r);
    if (r->c->cast) return cast(r);
    if (r->c->fault) return faults(r);
    return declare(r) || train(r) || (!is_silent_rank(r) && report(r));
}

static void *rank_main(void *argument) {
    rank *r = (rank *)argument;
    gmm_config config = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    char mine = 0, all[RANKS];
    int bad = 0;
    config.space = GMM_SPACE_CUDA;
    config.device = r->device;
    config.allocator.user = r;
    config.allocator.alloc = counted;
    config.allocator.release = release;
    if (cudaSetDevice(r->device) != cudaSuccess) bad = failed(r, GMM_E_CUDA, "cudaSetDevice", "failed");
    if (!bad && gmm_create(&r->ctx, &config, &error)) bad = failed(r, error.status, "gmm_create", error.text);
    if (!bad && gmm_runtime_of(r->ctx, &r->rt)) bad = failed(r, GMM_E_ARG, "gmm_runtime_of", "failed");
    if (!bad && (r->rt.stream_create(r->rt.self, 0, &r->compute) || r->rt.stream_create(r->rt.self, -5, &r->side[0]) ||
                 r->rt.stream_create(r->rt.self, -5, &r->side[1])))
        bad = failed(r, GMM_E_CUDA, "streams", gmm_last_error(r->ctx));
    if (host_allgather(&r->seat, &mine, all, 1)) bad = failed(r, GMM_E_COMM, "meet", "a rank is missing");
    r->out_of_memory = r->c->fault == NO_MEMORY && r->index == 1;
    if (!bad) bad = connect_ranks(r) || program(r);
    if (bad && r->gtp && !r->c->silent) (void)fprintf(stderr, "        rank %d: %s\n", r->index, r->text);
    (void)cudaDeviceSynchronize(); /* also after a failure the device must finish */
    (void)host_allgather(&r->seat, &mine, all, 1);
    if (is_silent_rank(r)) { /* the silent rank aborts its communicators itself */
        for (int k = 0; k < 2; k++)
            if (r->comm[k].give_up) r->comm[k].give_up(r->comm[k].self, "gone");
        (void)cudaDeviceSynchronize();
    }
    /* the communicators of the others must exist until here */
    if (r->c->silent) (void)host_allgather(&r->seat, &mine, all, 1);
    for (int i = 0; i < 2; i++)
        if (r->graph[i]) (void)cudaGraphExecDestroy(r->graph[i]);
    if (r->window[0] && !r->status) (void)r->comm[0].window_remove(r->comm[0].self, r->window[0]);
    if (!is_silent_rank(r)) (void)gmm_gtp_fini(r->gtp);
    for (int k = 0; k < 4; k++) {
        if (r->c->transport == PEERS) gmm_peers_close(&r->comm[k]);
        else gmm_nccl_close(&r->comm[k]);
    }
    case_free(r);
    free(r->memory);
    if (r->ctx) {
        (void)r->rt.stream_destroy(r->rt.self, r->compute);
        for (int i = 0; i < 2; i++) (void)r->rt.stream_destroy(r->rt.self, r->side[i]);
    }
    gmm_destroy(r->ctx);
    return NULL;
}

static int devices(void) {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
static int gpus(void) {
    const int count = devices();
    return count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : count;
}

static run *new_run(void) {
    static run w; /* large */
    memset(&w, 0, sizeof w);
    return &w;
}
/* Places the arrays of a result in memory; NULL: returns the bytes that they take. */
static size_t place_arrays(const gpu_case *c, int size, int shares, unsigned char *memory, gpu_result *out) {
    const size_t whole = (size_t)(c->layers * c->experts) * (size_t)c->rows * (size_t)c->rows;
    const size_t bytes[] = {whole * 4, whole * 4, whole * 2, (size_t)(shares * c->tokens * c->rows) * 2,
                            c->cast ? (size_t)size * CAST_BYTES : 0};
    size_t at[T_COUNT(bytes) + 1] = {0};
    for (int i = 0; i < T_COUNT(bytes); i++) at[i + 1] = at[i] + (bytes[i] + 255) / 256 * 256;
    if (!memory) return at[T_COUNT(bytes)];
    out->grads = (float *)(void *)(memory + at[0]);
    out->others = (float *)(void *)(memory + at[1]);
    out->weights = (uint16_t *)(void *)(memory + at[2]);
    out->outputs = (uint16_t *)(void *)(memory + at[3]);
    out->bytes = memory + at[4];
    return at[T_COUNT(bytes)];
}
static void take_states(const rank *ranks, int size, gpu_result *out) {
    double off = 0, all = 0;
    out->rounded_once = 1;
    for (int i = 0; i < size; i++) {
        off += ranks[i].off;
        all += ranks[i].all;
        out->rounded_once &= ranks[i].rounded_once;
        out->status[i] = ranks[i].status;
        out->seconds[i] = ranks[i].seconds;
        out->byte_count[i] = ranks[i].byte_count;
        snprintf(out->text[i], sizeof out->text[i], "%s", ranks[i].text);
    }
    out->off = all > 0 ? sqrt(off / all) : off;
}

/* ................................................................................ Ranks that share a GPU ... */

#ifdef GMM_WITH_CPU_RANKS
static const char program_name[] = "layers";
typedef struct job { gpu_case c; int shares; } job;
_Static_assert((int)sizeof(job) <= (int)PROCESS_JOB_BYTES, "a job fits");
/* What the ranks leave before the arrays of the result: their states, whose pointers mean nothing to the case. */
typedef struct states {
    rank rank[RANKS];
    gmm_gtp_statistics stats;
} states;
enum { STATES_BYTES = (sizeof(states) + 255) / 256 * 256 };

static int rank_program(const char *argument) {
    static process_rank process;
    static gpu_result out;
    run *w = new_run();
    states *left;
    const job *j;
    rank *r;
    if (!process_join(&process, argument, 60000)) return 2;
    j = (const job *)process.job;
    w->c = &j->c;
    w->out = &out;
    w->size = process.size;
    (void)place_arrays(&j->c, process.size, j->shares, process.result + STATES_BYTES, &out);
    r = &w->rank[process.rank];
    r->c = w->c;
    r->run = w;
    r->seat.process = &process;
    r->index = r->seat.rank = process.rank;
    r->size = process.size;
    r->micro = j->shares / process.size;
    (void)rank_main(r);
    left = (states *)(void *)process.result;
    left->rank[r->index] = *r;
    if (r->index == 0) left->stats = out.stats;
    return 0;
}

static void run_processes(const gpu_case *c, int size, int shares, gpu_result *out) {
    const size_t bytes = STATES_BYTES + place_arrays(c, size, shares, NULL, out);
    unsigned char *copy = (unsigned char *)t_host(bytes);
    states *left = (states *)(void *)copy;
    const job j = {*c, shares};
    process_segment *s = processes_run(program_name, &j, sizeof j, bytes, size, 120);
    memcpy(copy, processes_result(s), bytes); /* which the next run replaces */
    (void)place_arrays(c, size, shares, copy + STATES_BYTES, out);
    for (int i = 0; i < size; i++)
        if (!processes_report(s, i)->done) {
            left->rank[i].status = GMM_E_COMM;
            snprintf(left->rank[i].text, sizeof left->rank[i].text, "its process did not end");
        }
    take_states(left->rank, size, out);
    out->stats = left->stats;
}
#else
static void run_processes(const gpu_case *c, int size, int shares, gpu_result *out) {
    (void)c, (void)size, (void)shares, (void)out;
    t_skip("no POSIX threads");
}
#endif

/* Runs a case on `size` ranks; the tokens are those of `shares` ranks. */
static void run_case(const gpu_case *c, int size, int shares, gpu_result *out) {
    pthread_t threads[RANKS];
    run *w;
    memset(out, 0, sizeof *out);
    if (size > 1 && c->fault != SAME_GPU && (c->one_gpu || size > devices())) {
        run_processes(c, size, shares, out);
        return;
    }
    w = new_run();
    (void)place_arrays(c, size, shares, (unsigned char *)t_host(place_arrays(c, size, shares, NULL, out)), out);
    w->c = c;
    w->out = out;
    w->size = w->rendezvous.size = size;
    w->half[0].size = w->half[1].size = size / 2;
    for (int i = 0; i < 3; i++) {
        rendezvous *h = i < 2 ? &w->half[i] : &w->rendezvous;
        (void)pthread_mutex_init(&h->mutex, NULL);
        (void)pthread_cond_init(&h->changed, NULL);
    }
#ifdef HAVE_NCCL
    for (int k = 0; k < 2; k++)
        if (c->transport != ALONE && c->transport != PEERS && nccl_made[c->transport] != size)
            T_CHECK(ncclGetUniqueId(&nccl_id[k]) == ncclSuccess, "ncclGetUniqueId");
#endif
    for (int i = 0; i < size; i++) {
        rank *r = &w->rank[i];
        r->c = c;
        r->run = w;
        r->seat.rendezvous = &w->rendezvous;
        r->index = r->seat.rank = i;
        r->device = c->fault == SAME_GPU ? 0 : i;
        r->half_seat.rendezvous = &w->half[size > 1 && i >= size / 2];
        r->half_seat.rank = size > 1 ? i % (size / 2) : 0;
        r->size = size;
        r->micro = shares / size;
        T_CHECK(pthread_create(&threads[i], NULL, rank_main, r) == 0, "no thread");
    }
    for (int i = 0; i < size; i++) (void)pthread_join(threads[i], NULL);
    take_states(w->rank, size, out);
#ifdef HAVE_NCCL
    if (c->transport != ALONE && c->transport != PEERS) {
        nccl_halved[c->transport] = nccl_made[c->transport] == size ? nccl_halved[c->transport] || c->halves
                                                                    : c->halves;
        nccl_made[c->transport] = size; /* communicators of another size stay until the process ends */
    }
    for (int i = 0; i < size; i++)
        if (c->silent || out->status[i]) /* aborted communicators are destroyed */
            nccl_made[c->transport] = nccl_halved[c->transport] = 0;
#endif
    (void)cudaSetDevice(0);
}

#ifdef HAVE_NCCL
/* NCCL's debug log goes to a file, unless the environment sets NCCL_DEBUG. */
static char nccl_log[32];
static void forget_nccl_log(void) { (void)remove(nccl_log); }
static void keep_nccl_log(void) {
    static int asked;
    int file;
    if (asked++ || getenv("NCCL_DEBUG")) return;
    snprintf(nccl_log, sizeof nccl_log, "/tmp/gmm_nccl.XXXXXX");
    file = mkstemp(nccl_log);
    if (file < 0) {
        nccl_log[0] = 0;
        return;
    }
    (void)close(file);
    (void)atexit(forget_nccl_log);
    (void)setenv("NCCL_DEBUG", "INFO", 1);
    (void)setenv("NCCL_DEBUG_SUBSYS", "INIT", 1);
    (void)setenv("NCCL_DEBUG_FILE", nccl_log, 1);
}
#endif

/* The number of ranks that a case runs on this machine. */
static int need_gpus(transport transport) {
    const int n = gpus();
    if (device_emulated()) t_skip("the emulator has no peer copies");
    if (n == 1 && transport == PEERS) return 2;
    if (n < 2) t_skip("needs two GPUs");
#ifndef HAVE_NCCL
    if (transport != PEERS) t_skip("needs NCCL");
#else
    keep_nccl_log();
    T_CHECK(getenv("NCCL_NVLS_ENABLE") && !strcmp(getenv("NCCL_NVLS_ENABLE"), "0"), "NCCL_NVLS_ENABLE must be 0");
#endif
    (void)transport;
    return n;
}

/* ---------------------------------------------------------------------------------------------------- Cases --- */

static gpu_case plain(void) {
    gpu_case c;
    memset(&c, 0, sizeof c);
    c.layers = 4;
    c.experts = 3;
    c.rows = 120; /* padded, for 2 to 8 ranks */
    c.tokens = 96;
    c.prefetch = 1;
    c.steps = 4;
    return c;
}

/* The square of the distance, relative to that of b's norm. */
static double squared_distance(const float *a, const float *b, size_t n) {
    double d = 0, s = 0;
    for (size_t i = 0; i < n; i++) {
        d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        s += (double)b[i] * b[i];
    }
    return s > 0 ? d / s : d;
}

/* Whether the reduction adds in the order of one GPU, so that bits are equal: two ranks need one addition; peer copies
   and exchanged parts are added in fp32 in rank order, which is the order of one GPU's micro-batches; sums of small
   integers are exact in any order. Otherwise NCCL chooses the order, or values are rounded to bf16 on the wire. */
static int adds_alike(const gpu_case *c, int n) {
    const int exchange = c->reduction == GMM_GTP_REDUCE_EXCHANGE ||
                         (c->reduction == GMM_GTP_REDUCE_AUTO &&
                          (c->transport == PEERS || (c->wire == GMM_BF16 && n > 2)));
    return c->integers || exchange || (c->wire != GMM_BF16 && (n == 2 || c->transport == PEERS));
}

/* Runs a case on n ranks, and on one GPU that has all micro-batches. Returns the squared distance of the gradients. */
static double run_both(const gpu_case *c, int n, gpu_result *want, gpu_result *got) {
    const size_t whole = (size_t)(c->layers * c->experts) * (size_t)c->rows * (size_t)c->rows;
    gpu_case alone = *c;
    alone.transport = ALONE;
    alone.replay = alone.synchronous = alone.recompute = 0;
    run_case(&alone, 1, n, want);
    T_CHECK(want->status[0] == GMM_OK, "alone: %s", want->text[0]);
    run_case(c, n, n, got);
    for (int i = 0; i < n; i++) T_CHECK(got->status[i] == GMM_OK, "rank %d: %s", i, got->text[i]);
    T_CHECK(squared_distance(want->grads, want->grads, whole) == 0, "NaN on one GPU");
    return squared_distance(got->grads, want->grads, whole);
}

/* Compares n ranks with one GPU: bit for bit if the reduction adds in the same order. Otherwise the first step has
   equal outputs, and gradients that differ by roundings of their sum alone: of n - 1 partial sums to u = 2^-8 on a wire
   of BF16. Where these errors are uniform, their squares are at most u^2 / 3 of the squared partial sums, which are in
   the mean no larger than the whole. Later a single weight that rounds to its other neighbour moves all gradients by
   more than that, so their bound after all steps is loose. */
static void compare(gpu_case *c) {
    const int n = c->one_gpu && need_gpus(c->transport) ? 2 : need_gpus(c->transport);
    const size_t whole = (size_t)(c->layers * c->experts) * (size_t)c->rows * (size_t)c->rows;
    const size_t outputs = (size_t)(n * c->tokens * c->rows) * 2;
    const double begin = gtp_seconds();
    gpu_result want, got;
    double first = 0, off;
    if (!adds_alike(c, n)) {
        const double bound = c->wire == GMM_BF16 ? (n - 1) * 0x1p-16 / 3 : 1e-12;
        gpu_case one_step = *c;
        one_step.steps = 1;
        first = run_both(&one_step, n, &want, &got);
        T_CHECK(first < bound, "main_grad of the first step is off by %g, squared, more than %g", first, bound);
        t_same("outputs of the first step", got.outputs, want.outputs, outputs);
    }
    off = run_both(c, n, &want, &got);
    if (adds_alike(c, n)) {
        t_same("main_grad", got.grads, want.grads, whole * 4);
        t_same("weights", got.weights, want.weights, whole * 2);
        t_same("outputs", got.outputs, want.outputs, outputs);
    } else T_CHECK(off < 1e-4, "main_grad is off by %g, squared", off);
    T_CHECK(got.stats.acquires == got.stats.prefetched + got.stats.resident + got.stats.exposed, "counts");
    if (T.verbose)
        printf("        %s: %.1f s; off by %.2g and %.2g, squared; %lld acquires, %lld prefetched, %lld resident, "
               "%lld exposed\n", transport_name[c->transport], gtp_seconds() - begin, first, off,
               (long long)got.stats.acquires, (long long)got.stats.prefetched, (long long)got.stats.resident,
               (long long)got.stats.exposed);
}
#define compare(...) T_CALL(compare, __VA_ARGS__)

/* One GPU without communicator: nothing is gathered or reduced, and graphs give the results of eager execution. */
static void one_gpu(int arg) {
    gpu_result out[3];
    (void)arg;
    for (int i = 0; i < 3; i++) {
        gpu_case c = plain();
        const size_t whole = (size_t)(c.layers * c.experts) * (size_t)c.rows * (size_t)c.rows;
        c.transport = ALONE;
        c.replay = i;
        run_case(&c, 1, 1, &out[i]);
        T_CHECK(out[i].status[0] == GMM_OK, "replay %d: %s", i, out[i].text[0]);
        T_CHECK(out[i].stats.gathers == 0 && out[i].stats.gathered_bytes == 0 && out[i].stats.reduced_bytes == 0,
                "replay %d: %lld gathers", i, (long long)out[i].stats.gathers);
        T_CHECK(squared_distance(out[i].grads, out[i].grads, whole) == 0, "NaN");
        t_same("main_grad", out[i].grads, out[0].grads, whole * 4);
        t_same("weights", out[i].weights, out[0].weights, whole * 2);
        t_same("outputs", out[i].outputs, out[0].outputs, (size_t)(c.tokens * c.rows) * 2);
    }
}
static void trains(int arg) {
    gpu_case c = plain();
    c.transport = (transport)arg;
    compare(&c);
}
/* Two ranks on one GPU, also on a machine with several. */
static void on_one_gpu(int arg) {
    for (int i = 0; i < 3; i++) {
        gpu_case c = plain();
        c.transport = PEERS;
        c.one_gpu = 1;
        c.mlp = i == 1;
        c.layers = c.mlp ? 2 : c.layers;
        c.replay = i == 2;
        compare(&c);
    }
    (void)arg;
}
static void depths(int arg) {
    for (int depth = 0; depth <= 3; depth++) {
        gpu_case c = plain();
        c.transport = (transport)arg;
        c.prefetch = depth;
        compare(&c);
    }
}
static void reductions(int arg) {
    for (int i = 0; i < 4; i++) {
        gpu_case c = plain();
        c.transport = (transport)arg;
        c.wire = i & 1 ? GMM_BF16 : GMM_F32;
        c.reduction = i & 2 ? GMM_GTP_REDUCE_EXCHANGE : GMM_GTP_REDUCE_SCATTER;
        compare(&c);
    }
}
/* One layer of small integers: every wire dtype and reduction algorithm gives the same bits with any number of ranks,
   also scaled by a power of two. */
static void integers(int arg) {
    for (int i = 0; i < 8; i++) {
        gpu_case c = plain();
        c.transport = (transport)arg;
        c.layers = 1;
        c.integers = 1;
        c.wire = i & 1 ? GMM_BF16 : GMM_F32;
        c.reduction = i & 2 ? GMM_GTP_REDUCE_EXCHANGE : GMM_GTP_REDUCE_SCATTER;
        c.scale = i & 4 ? 0.25f : 0;
        c.steps = 2;
        compare(&c);
    }
}
/* Two domains of different size: every other layer is sharded over either half of the ranks, and the sum of both
   halves' gradients is that of one GPU. */
static void two_domains(int arg) {
    gpu_case c = plain(), alone;
    gpu_result want, got;
    const int n = need_gpus((transport)arg);
    const size_t whole = (size_t)(c.layers * c.experts) * (size_t)c.rows * (size_t)c.rows;
    if (n < 4) t_skip("needs four GPUs"); /* halves of two */
    c.transport = (transport)arg;
    c.halves = 1;
    c.steps = 1; /* the test does not add up the halves' gradients, which a second step would need */
    alone = c;
    alone.transport = ALONE;
    run_case(&alone, 1, n, &want);
    T_CHECK(want.status[0] == GMM_OK, "alone: %s", want.text[0]);
    run_case(&c, n, n, &got);
    for (int i = 0; i < n; i++) T_CHECK(got.status[i] == GMM_OK, "rank %d: %s", i, got.text[i]);
    for (size_t i = 0; i < whole; i++) got.grads[i] += got.others[i];
    T_CHECK(squared_distance(got.grads, want.grads, whole) < 1e-12, "main_grad is off by %g, squared",
            squared_distance(got.grads, want.grads, whole));
    t_same("outputs", got.outputs, want.outputs, (size_t)(n * c.tokens * c.rows) * 2);
}
static void variants(int arg) { /* synchronous, recomputed, a rank without tokens, one expert, gathered together */
    for (int i = 0; i < 5; i++) {
        gpu_case c = plain();
        c.transport = (transport)arg;
        c.synchronous = i == 0;
        c.recompute = i == 1;
        c.zero_rank = i == 2 ? 2 : 0;
        c.experts = i == 3 ? 1 : c.experts;
        c.rows = i == 3 ? 256 : c.rows;
        c.together = i == 4 ? 2 : 0;
        compare(&c);
    }
}
static void replays(int arg) {
    for (int i = 0; i < 4; i++) { /* one graph of forward and backward or one each; or more layers than wgrad slots */
        gpu_case c = plain();
        c.transport = (transport)arg;
        c.replay = 1 + i % 2;
        c.layers = i < 2 ? 2 : 4; /* few enough for finite values */
        c.rate = i < 2 ? 0 : 0.00005f;
        c.experts = 2;
        c.rows = 64;
        c.tokens = 32;
        c.steps = i < 2 ? 100 : 40;
        compare(&c);
    }
}
static void many_steps(int arg) {
    gpu_case c = plain();
    c.transport = (transport)arg;
    c.layers = 2;
    c.experts = 2;
    c.rows = 64;
    c.tokens = 32;
    c.prefetch = 2;
    c.steps = need_gpus(c.transport) > devices() ? 1000 : 10000; /* processes take turns on a GPU */
    compare(&c);
}
static void large_layers(int arg) { /* square layers larger than a copy engine's smallest piece, prefetch 2 */
    gpu_case c = plain();
    c.transport = (transport)arg;
    c.layers = 3;
    c.experts = 2;
    c.rows = 1024;
    c.tokens = 256;
    c.prefetch = 2;
    compare(&c);
}
static void quantized(int arg) {
    static const int counts[] = {F_FEW, 1, 2, 8, 64, F_MOST}; /* more weights than peer copies enqueue at a time */
    for (int k = 0; k < (int)T_COUNT(counts); k++) {
        gpu_case c = plain();
        gpu_result out;
        int n;
        c.transport = (transport)arg;
        c.formats = 1;
        c.experts = counts[k];
        n = need_gpus(c.transport);
        run_case(&c, n, n, &out);
        for (int i = 0; i < n; i++)
            T_CHECK(out.status[i] == GMM_OK, "%d experts, rank %d: %s", counts[k], i, out.text[i]);
    }
}
/* Random gradients compared with fp64: a ring that rounds to bf16 at every rank, a sum in fp32 that is rounded once or
   not at all, a single addition of two ranks, a scale that is no power of two, rank counts that are no power of two. */
static void random_sums(int arg) {
    const int n = need_gpus((transport)arg), sizes[] = {3, 6, n};
    for (int k = 0; k < 3; k++) {
        double scattered = 0;
        for (int i = 0; i < 4 && sizes[k] <= (devices() > n ? devices() : n); i++) {
            gpu_case c = plain();
            gpu_result out;
            double most;
            c.transport = (transport)arg;
            c.sums = 1;
            c.wire = i & 1 ? GMM_F32 : GMM_BF16;
            c.reduction = i & 2 ? GMM_GTP_REDUCE_EXCHANGE : GMM_GTP_REDUCE_SCATTER;
            c.scale = c.wire == GMM_BF16 ? 1.0f : 1.0f / (float)(sizes[k] % 3 ? 3 : sizes[k]);
            most = c.wire == GMM_F32 ? 1e-6 : c.transport == PEERS || i & 2 ? 4e-3 : 1e-2;
            run_case(&c, sizes[k], sizes[k], &out);
            for (int q = 0; q < sizes[k]; q++) T_CHECK(out.status[q] == GMM_OK, "rank %d: %s", q, out.text[q]);
            T_CHECK(out.off <= most, "%d ranks, case %d: off by %g, more than %g", sizes[k], i, out.off, most);
            if (i == 0) scattered = out.off;
            if (i == 0 && sizes[k] == 2) T_CHECK(out.rounded_once, "a sum of two is not rounded once");
            if (i == 2) T_CHECK(out.off <= scattered, "exchanged: off by %g, scattered: %g", out.off, scattered);
            if (T.verbose) printf("        %d ranks, case %d: off by %g\n", sizes[k], i, out.off);
        }
    }
}
static void mlps(int arg) { /* ten steps of SGD on FC1 and FC2, three where a recipe quantizes gathered weights */
    for (int kind = GMM_RECIPE_NONE; kind <= GMM_RECIPE_NVFP4; kind++) {
        gpu_case c = plain();
        c.transport = (transport)arg;
        c.mlp = 1;
        c.layers = 2;
        c.steps = kind ? 3 : 10;
        c.recipe = (gmm_recipe_kind)kind;
        if (kind) c.rows = 128; /* whole blocks of 32 */
        t_about("%s", kind ? ref_recipe_name(c.recipe) : "bf16");
        compare(&c);
    }
}
static void poisoned(int arg) { /* gather slots, staging and reduction buffers are filled with NaN before every step */
    for (int i = 0; i < 2; i++) {
        gpu_case c = plain();
        c.transport = (transport)arg;
        c.poison = 1;
        c.reduction = i ? GMM_GTP_REDUCE_EXCHANGE : GMM_GTP_REDUCE_SCATTER;
        compare(&c);
    }
}
/* NCCL's log shows that no communicator uses NVLink multicast (NVLS), with windows or without. */
static void no_multicast(int arg) {
#ifdef HAVE_NCCL
    char line[1024];
    FILE *file;
    int communicators = 0;
    trains(NCCL);
    trains(NCCL_WINDOWS);
    if (!nccl_log[0]) t_skip("NCCL_DEBUG is set");
    file = fopen(nccl_log, "r");
    T_CHECK(file != NULL, "no log of NCCL");
    while (fgets(line, sizeof line, file)) {
        char *at = strstr(line, " nvls channels");
        int digits = 0;
        if (!at) continue;
        while (at > line + digits && at[-1 - digits] >= '0' && at[-1 - digits] <= '9') digits++;
        communicators += digits > 0;
        if (digits != 1 || at[-1] != '0') {
            (void)fclose(file);
            T_FAIL("%s", line);
        }
    }
    (void)fclose(file);
    T_CHECK(communicators > 0, "NCCL's log counts the NVLS channels of no communicator");
    if (T.verbose) printf("        %d communicators without multicast\n", communicators);
#endif
    (void)need_gpus((transport)arg);
}
static void casts(int arg) {
    for (int i = 0; i < (int)T_COUNT(cast_to); i++) {
        gpu_case c = plain(), alone;
        gpu_result want, got;
        int n;
        c.transport = (transport)arg;
        c.cast = 1 + i;
        alone = c;
        alone.transport = ALONE;
        n = need_gpus(c.transport);
        run_case(&alone, 1, n, &want);
        T_CHECK(want.status[0] == GMM_OK, "%s alone: %s", cast_name[i], want.text[0]);
        run_case(&c, n, n, &got);
        for (int k = 0; k < n; k++) {
            T_CHECK(got.status[k] == GMM_OK, "%s, rank %d: %s", cast_name[i], k, got.text[k]);
            T_CHECK(got.byte_count[k] == want.byte_count[0] && want.byte_count[0] > 0, "%s, rank %d: %lld bytes",
                    cast_name[i], k, (long long)got.byte_count[k]);
            t_same(cast_name[i], got.bytes + (size_t)k * CAST_BYTES, want.bytes, (size_t)want.byte_count[0]);
        }
    }
}
static void one_fails(int arg) { /* a failure on one rank is an error on all ranks, without waiting for a timeout */
    static const int kinds[] = {NO_MEMORY, FAILED_WINDOW, OTHER_SIZE, GIVEN_UP};
    for (int k = 0; k < (int)T_COUNT(kinds); k++) {
        gpu_case c = plain();
        gpu_result out;
        const double begin = gtp_seconds();
        const int n = need_gpus((transport)arg);
        c.transport = (transport)arg;
        c.fault = kinds[k];
        run_case(&c, n, n, &out);
        for (int i = 0; i < n; i++) {
            const gmm_status want = c.fault != NO_MEMORY ? GMM_OK : i == 1 ? GMM_E_MEMORY : GMM_E_COMM;
            T_CHECK(out.status[i] == want, "case %d, rank %d: %s", c.fault, i, out.text[i]);
            T_CHECK(c.fault != NO_MEMORY || i == 1 || strstr(out.text[i], "rank 1 of"), "%s", out.text[i]);
        }
        T_CHECK(gtp_seconds() - begin < 10, "case %d took %.1f s", c.fault, gtp_seconds() - begin);
    }
}
static void silence(int arg) {
    gpu_case c = plain();
    gpu_result out;
    const double begin = gtp_seconds();
    int n;
    c.transport = (transport)arg;
    c.silent = 1;
    n = need_gpus(c.transport);
    run_case(&c, n, n, &out);
    for (int i = 0; i < n; i++) {
        if (i == 1) continue;
        T_CHECK(out.status[i] == GMM_E_COMM, "rank %d: %s: %s", i, gmm_status_name(out.status[i]), out.text[i]);
        T_CHECK(out.seconds[i] < 10, "the error came after %.1f s", out.seconds[i]);
        if (T.verbose) printf("        rank %d after %.1f s: %s\n", i, out.seconds[i], out.text[i]);
    }
    T_CHECK(gtp_seconds() - begin < 30, "all of it took %.1f s", gtp_seconds() - begin);
}

/* Threads that share a GPU are refused: CUDA may run what one of them waits for behind the wait. */
static void threads_on_one_gpu(int arg) {
    gpu_case c = plain();
    gpu_result out;
    (void)arg;
    if (device_emulated()) t_skip("the emulator has no peer copies");
    c.transport = PEERS;
    c.fault = SAME_GPU;
    run_case(&c, 3, 3, &out);
    for (int i = 0; i < 3; i++) {
        T_CHECK(out.status[i] == GMM_E_COMM, "rank %d: %s: %s", i, gmm_status_name(out.status[i]), out.text[i]);
        T_CHECK(strstr(out.text[i], "of 3 are threads on GPU 0"), "%s", out.text[i]);
    }
}

void tests_gtp_gpu(void) {
    t_add_host(arguments, 0, "gtp on GPUs: what a build lacks, arguments");
    for (int i = 0; i < 2; i++) t_add_host(leaves, i, "gtp on GPUs: what a GEMM leaves, %s", i ? "asked" : "sums");
#ifdef GMM_WITH_CPU_RANKS
    t_add_rank_program(program_name, rank_program);
#endif
    t_add_gpu_alone(threads_on_one_gpu, 0, "gtp on GPUs: peers, threads on one GPU are refused");
    t_add_gpu_alone(one_gpu, 0, "gtp on GPUs: one, with graphs and without");
    for (int v = NCCL; v <= PEERS; v++) {
        t_add_gpu_alone(trains, v, "gtp on GPUs: %s equals one GPU", transport_name[v]);
        t_add_gpu_alone(quantized, v, "gtp on GPUs: %s, quantized bytes, maxima", transport_name[v]);
        t_add_gpu_alone(casts, v, "gtp on GPUs: %s, quantized, then gathered", transport_name[v]);
        t_add_gpu_alone(integers, v, "gtp on GPUs: %s, integers", transport_name[v]);
        t_add_gpu_alone(large_layers, v, "gtp on GPUs: %s, layers of 1024 x 1024", transport_name[v]);
        t_add_gpu_alone(random_sums, v, "gtp on GPUs: %s, sums beside fp64", transport_name[v]);
        t_add_gpu_alone(mlps, v, "gtp on GPUs: %s, an MLP", transport_name[v]);
        t_add_gpu_alone(poisoned, v, "gtp on GPUs: %s, poisoned between steps", transport_name[v]);
        t_add_gpu_alone(depths, v, "gtp on GPUs: %s, prefetch 0 to 3", transport_name[v]);
        t_add_gpu_alone(reductions, v, "gtp on GPUs: %s, wires and reductions", transport_name[v]);
        t_add_gpu_alone(variants, v, "gtp on GPUs: %s, variants", transport_name[v]);
        t_add_gpu_alone(replays, v, "gtp on GPUs: %s, graphs", transport_name[v]);
    }
    t_add_gpu_alone(on_one_gpu, 0, "gtp on GPUs: peers, two ranks on one of them");
    t_add_gpu_alone(no_multicast, NCCL, "gtp on GPUs: nccl, with windows and without, no multicast");
    for (int v = NCCL; v <= PEERS; v += PEERS - NCCL)
        t_add_gpu_alone(two_domains, v, "gtp on GPUs: %s, two domains", transport_name[v]);
    for (int v = PEERS; v >= NCCL; v--)
        t_add_gpu_alone(many_steps, v, "gtp on GPUs: %s, many steps", transport_name[v]);
    t_add_gpu_alone(one_fails, PEERS, "gtp on GPUs: peers, one rank fails");
    t_add_gpu_alone(silence, PEERS, "gtp on GPUs: peers, a rank is gone");
    t_add_gpu_alone(silence, NCCL, "gtp on GPUs: nccl, a rank is gone");
}
#else
void tests_gtp_gpu(void) {
    t_add_host(arguments, 0, "gtp on GPUs: what a build lacks, arguments");
    for (int i = 0; i < 2; i++) t_add_host(leaves, i, "gtp on GPUs: what a GEMM leaves, %s", i ? "asked" : "sums");
}
#endif
