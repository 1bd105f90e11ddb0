/* test_gtp_processes.c - ranks that are processes train an expert MLP in every recipe: on the CPU they exchange data in
   shared memory, on GPUs by peer copies in memory that CUDA IPC opens, also where all of them share one GPU. Results
   equal, bit for bit, those of one rank that computes all micro-batches. A rank that is killed or stopped is an error
   of the others, in words and in bounded time. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* kill, nanosleep */
#endif
#include "gtp_world.h"
#include "process_ranks.h"

#ifdef GMM_WITH_CPU_RANKS
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef HAVE_CUDA
#include "device.h"
#include <cuda_runtime.h>
#endif

enum { HIDDEN = 224, FFN = 96, EXPERTS = 2, TOKENS = 72, MICRO = PROCESS_RANKS, STEPS = 3, BLOCKS = 128 };
static const int64_t rows_of[2] = {2 * FFN, HIDDEN}, cols_of[2] = {HIDDEN, FFN}; /* of FC1 and FC2 */

/* Where the ranks compute: on the CPU, all on GPU 0, or on GPUs 0, 1, ... */
typedef enum place { ON_CPU, ON_ONE_GPU, ON_GPUS } place;
/* What befalls rank 1: nothing; it kills itself in a collective, or between two calls of the second step; it stops
   there; it leaves out the quantization of its shards in that step. */
typedef enum fate { LIVES, KILLED_IN_CALL, KILLED_BETWEEN, STOPPED, OUT_OF_STEP } fate;

typedef struct job {
    place place;
    gmm_recipe_kind recipe;
    int rounded;        /* 1: shards are BF16, and the MLP quantizes what was gathered; 0: they are quantized */
    int mixed;          /* 1: FC1 and FC2 of all experts are one bundle, of two shapes */
    int micro;          /* micro-batches of all ranks */
    int fatal_call, timeout_ms;
    fate fate;
    gmm_gtp_reduction reduction;
} job;

/* Offsets in the results: main_grads and masters of all rows, y and dx of all micro-batches. */
enum { WEIGHT_FLOATS = EXPERTS * (2 * FFN * HIDDEN + HIDDEN * FFN), TOKEN_VALUES = MICRO * TOKENS * HIDDEN,
       MASTERS = WEIGHT_FLOATS * 4, OUTPUTS = 2 * MASTERS, RESULT_BYTES = OUTPUTS + 2 * TOKEN_VALUES * 2 };

/* ------------------------------------------------------------------------------------------------------ A rank --- */

typedef struct weight {
    gmm_shard shard;
    gmm_shard_plan plan;
    gmm_mat mat, columnwise;      /* what the MLP reads, set by `need` */
    gmm_gtp_view dw;
    float *master[EXPERTS], *main_grad[EXPERTS];
    int32_t ids[EXPERTS], bundle, first; /* first: index in the bundle of the first expert's */
    int acquired;
} weight;

typedef struct trainer {
    process_rank process;
    const job *job;
    gmm_context *ctx;
    gmm_runtime rt;
    gmm_stream stream, side[2];
    gmm_comm comm[2];
    gmm_gtp *gtp;
    gmm_recipe recipe;
    weight w[2];
    int micro, first_micro;       /* of the whole: this rank's */
    int32_t *sizes[MICRO];
    uint16_t *x[MICRO], *dy[MICRO], *y[MICRO], *dx[MICRO];
    uint64_t *random;
    void *workspace, *saved;
    size_t workspace_bytes, saved_bytes;
    int opens;                    /* 1: the step's first micro-batch of this rank, whose gradients replace main_grad */
    void *blocks[BLOCKS];
    int block_count;
} trainer;

static int on_gpu(const trainer *t) { return t->job->place != ON_CPU; }

static int failed(trainer *t, gmm_status s, const char *call, const char *text) {
    process_report *r = t->process.report;
    if (r->status) return 1;
    r->status = s;
    snprintf(r->text, sizeof r->text, "%s: %.60s: %.400s", gmm_status_name(s), call, text);
    return 1;
}
static const char *error_text(const trainer *t) {
    const char *text = t->gtp ? gmm_gtp_last_error(t->gtp) : "";
    return *text ? text : t->ctx ? gmm_last_error(t->ctx) : "";
}
#define GO(t, call) \
    do { const gmm_status s_ = (call); if (s_) return failed(t, s_, #call, error_text(t)); } while (0)

/* Memory of the rank, filled with `byte`. CUDA IPC opens whole allocations of 2 MiB or more. */
static void *block(trainer *t, size_t bytes, int byte) {
    void *p = NULL;
    bytes = (bytes + 255) / 256 * 256;
#ifdef HAVE_CUDA
    if (on_gpu(t)) {
        bytes = (bytes + (2 << 20) - 1) / (2 << 20) * (2 << 20);
        if (cudaMalloc(&p, bytes) != cudaSuccess || cudaMemset(p, byte, bytes) != cudaSuccess ||
            cudaDeviceSynchronize() != cudaSuccess) p = NULL;
    } else
#endif
    {
        p = aligned_alloc(256, bytes);
        if (p) memset(p, byte, bytes);
    }
    if (!p || t->block_count == BLOCKS) (void)failed(t, GMM_E_MEMORY, "memory", "none");
    if (p && t->block_count < BLOCKS) t->blocks[t->block_count++] = p;
    return p;
}
static int copy(trainer *t, void *to, const void *from, size_t bytes) {
#ifdef HAVE_CUDA
    if (on_gpu(t)) {
        const cudaError_t e = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
        return e == cudaSuccess ? 0 : failed(t, GMM_E_CUDA, "copy", cudaGetErrorString(e));
    }
#endif
    (void)t;
    memcpy(to, from, bytes);
    return 0;
}
static int upload(trainer *t, void *out, const void *from, size_t bytes) {
    void *p = block(t, bytes, 0xFF);
    memcpy(out, &p, sizeof p);
    return !p || copy(t, p, from, bytes);
}
/* Waits for the stream while polling the collectives, as a program should. */
static int wait_polled(trainer *t) {
    const struct timespec pause = {0, 50000};
    const double begin = gtp_seconds();
    int done = !on_gpu(t);
    for (;;) {
#ifdef HAVE_CUDA
        const cudaError_t e = on_gpu(t) ? cudaStreamQuery(t->stream) : cudaSuccess;
        if (e != cudaSuccess && e != cudaErrorNotReady)
            return failed(t, GMM_E_CUDA, "wait", cudaGetErrorString(e));
        done = e == cudaSuccess;
#endif
        t->process.report->seconds = gtp_seconds() - begin;
        GO(t, gmm_gtp_poll(t->gtp));
        if (done) return 0;
        (void)nanosleep(&pause, NULL);
    }
}

static float number(uint64_t key, float scale) {
    return scale * ((float)(mix(key) % 20001) / 10000.0f - 1.0f);
}

/* Tokens and output gradients of a micro-batch: functions of its number among those of all ranks. The second expert of
   every other one has no tokens. */
static int fill(trainer *t) {
    static uint16_t host[TOKENS * HIDDEN];
    const uint64_t random[4] = {1, 2, 3, 4};
    for (int m = 0; m < t->micro; m++) {
        const int who = t->first_micro + m;
        const int32_t sizes[EXPERTS] = {who % 2 ? 41 : 61, who % 2 ? 27 : 0};
        for (int k = 0; k < 2; k++) {
            for (int i = 0; i < TOKENS * HIDDEN; i++)
                host[i] = gmm_f32_to_bf16(number((uint64_t)((i * 2 + k) * MICRO + who), 1));
            if (upload(t, k ? (void *)&t->dy[m] : (void *)&t->x[m], host, sizeof host)) return 1;
        }
        if (upload(t, &t->sizes[m], sizes, sizeof sizes)) return 1;
        t->y[m] = (uint16_t *)block(t, sizeof host, 0xFF);
        t->dx[m] = (uint16_t *)block(t, sizeof host, 0xFF);
    }
    return upload(t, &t->random, random, sizeof random) || t->process.report->status;
}

/* The shards of a weight of the MLP. A master's value depends on its place in the whole matrix. */
static int declare_weight(trainer *t, int k, float *amax) {
    weight *w = &t->w[k];
    const gmm_format *f = t->job->rounded || !t->recipe.weight.dtype ? NULL : &t->recipe.weight;
    const size_t values = (size_t)(rows_of[k] * cols_of[k]);
    float *host = (float *)calloc(2 * values, sizeof *host);
    gmm_error error = GMM_ZERO;
    w->first = t->job->mixed * k * EXPERTS;
    w->shard.dtype = f ? f->dtype : GMM_BF16;
    w->shard.scaling = f ? f->scaling : GMM_SCALING_NONE;
    w->shard.rows = rows_of[k];
    w->shard.cols = cols_of[k];
    w->shard.gtp_size = t->process.size;
    w->shard.gtp_rank = t->process.rank;
    if (gmm_gtp_plan(&w->shard, &w->plan, &error)) return free(host), failed(t, error.status, "plan", error.text);
    for (int e = 0; e < EXPERTS; e++) {
        const size_t bytes = (size_t)(w->plan.shard_rows * cols_of[k]) * sizeof(float);
        gmm_gtp_weight d = GMM_ZERO;
        for (int64_t i = 0; i < w->plan.valid_rows * cols_of[k]; i++)
            host[i] = number((uint64_t)((w->plan.row0 * cols_of[k] + i) * 8 + 2 * e + k), 0.2f);
        memset(host + w->plan.valid_rows * cols_of[k], 0, bytes - (size_t)(w->plan.valid_rows * cols_of[k]) * 4);
        if (upload(t, &w->master[e], host, bytes)) return free(host), 1;
        w->main_grad[e] = (float *)block(t, bytes, 0xFF);
        d.expert = w->first + e;
        d.name = k ? "fc2" : "fc1";
        d.shard = &w->shard;
        d.format = f;
        d.main_grad = w->main_grad[e];
        d.main_grad_dtype = GMM_F32;
        if (w->shard.scaling == GMM_SCALING_NV16) d.amax = amax + k * EXPERTS + e;
        for (int i = 0; i < 2; i++) {
            if (w->plan.shard_data_bytes[i]) d.data[i] = block(t, (size_t)w->plan.shard_data_bytes[i], 0xFF);
            if (w->plan.shard_scale_bytes[i]) d.scale[i] = block(t, (size_t)w->plan.shard_scale_bytes[i], 0xFF);
        }
        if (t->process.report->status || gmm_gtp_add_weight(t->gtp, &d, &w->ids[e]))
            return free(host), failed(t, GMM_E_ARG, "add_weight", error_text(t));
    }
    free(host);
    return 0;
}
/* Bundles of the weights: one each, or one of both. */
static int declare_bundles(trainer *t, int32_t domain) {
    const int all = 2 * EXPERTS, count = t->job->mixed ? all : EXPERTS;
    int32_t ids[2 * EXPERTS];
    for (int i = 0; i < all; i++) ids[i] = t->w[i / EXPERTS].ids[i % EXPERTS];
    for (int k = 0; k < all / count; k++)
        GO(t, gmm_gtp_add_bundle(t->gtp, domain, ids + k * EXPERTS, count, k ? "fc2" : "fc1", &t->w[k].bundle));
    if (t->job->mixed) t->w[1].bundle = t->w[0].bundle;
    return 0;
}

/* The dtype and format of a weight that is gathered when a product needs it. */
static int announce(trainer *t, weight *w) {
    const gmm_format *f = w->shard.scaling ? &t->recipe.weight : NULL;
    const int turned = w->shard.scaling == GMM_SCALING_TENSOR || w->shard.scaling == GMM_SCALING_128X128;
    gmm_layout layout = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    w->mat = f ? gmm_mat_quantized(f, GMM_ROWWISE, NULL, NULL, NULL) : gmm_mat_packed(GMM_BF16, NULL);
    if (!f) return 0;
    if (gmm_layout_of(f->dtype, f->scaling, f->order, GMM_COLUMNWISE, w->plan.padded_rows, w->plan.local_cols, &layout,
                      &error)) return failed(t, error.status, "layout", error.text);
    w->columnwise = gmm_mat_quantized(f, GMM_COLUMNWISE, NULL, NULL, NULL);
    w->columnwise.ld = layout.transposed && (t->process.size > 1 || turned) ? layout.data_cols : 0;
    w->mat.columnwise = &w->columnwise;
    return 0;
}

static gmm_status need(void *user, gmm_param which, gmm_op op, gmm_stream stream) {
    trainer *t = (trainer *)user;
    const int pass = op == GMM_OP_LINEAR_FWD ? GMM_GTP_FORWARD : GMM_GTP_BACKWARD;
    weight *w = &t->w[which == GMM_PARAM_W2], *other = &t->w[which != GMM_PARAM_W2];
    gmm_gtp_view v = GMM_ZERO;
    gmm_status s = GMM_OK;
    if (t->job->mixed) {
        weight *both = &t->w[0];
        if (!both->acquired) s = gmm_gtp_acquire(t->gtp, both->bundle, (gmm_gtp_pass)pass, stream, &v);
        both->acquired = 1;
        memset(&v, 0, sizeof v);
        if (!s && gmm_gtp_view_part(t->gtp, w->bundle, (gmm_gtp_pass)pass, 0, 2 * EXPERTS, &v) != GMM_E_CONFIG)
            (void)failed(t, GMM_E_STATE, "gmm_gtp_view_part", "a part of two shapes is not refused");
        if (!s) s = gmm_gtp_view_part(t->gtp, w->bundle, (gmm_gtp_pass)pass, w->first, EXPERTS, &v);
        w->mat = v.mat;
        return s;
    }
    if (other->acquired) s = gmm_gtp_release(t->gtp, other->bundle, (gmm_gtp_pass)pass, stream);
    other->acquired = 0;
    if (!s) s = gmm_gtp_acquire(t->gtp, w->bundle, (gmm_gtp_pass)pass, stream, &v);
    w->acquired = 1;
    w->mat = v.mat;
    return s;
}
static void ready(void *user, gmm_param which, gmm_stream stream) {
    trainer *t = (trainer *)user;
    const weight *w = &t->w[which == GMM_PARAM_W2];
    gmm_gtp_gradient g = GMM_ZERO;
    g.scale = 1;
    g.add = t->opens ? GMM_GTP_SET : GMM_GTP_ADD;
    if (t->job->mixed && which == GMM_PARAM_W2) return; /* that of FC1 follows */
    if (gmm_gtp_submit(t->gtp, w->bundle, &g, stream)) (void)failed(t, GMM_E_COMM, "submit", error_text(t));
}

/* Forward or backward of micro-batch m; with `query` alone the sizes of its buffers. */
static int through_mlp(trainer *t, int m, gmm_op op, int query) {
    const int backward = op == GMM_OP_MLP_BWD;
    gmm_mat x = gmm_mat_packed(GMM_BF16, t->x[m]), y = gmm_mat_packed(GMM_BF16, t->y[m]);
    gmm_mat dy = gmm_mat_packed(GMM_BF16, t->dy[m]), dx = gmm_mat_packed(GMM_BF16, t->dx[m]);
    const gmm_mat f32 = gmm_mat_packed(GMM_F32, NULL);
    gmm_grad dw[2];
    gmm_grad_hooks hooks = GMM_ZERO;
    gmm_mlp_quant quant = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_groups groups = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    memset(dw, 0, sizeof dw);
    for (int k = 0; k < 2; k++) {
        if (announce(t, &t->w[k])) return 1;
        dw[k].mat = query ? &f32 : &t->w[k].dw.mat;
        memset(&t->w[k].dw, 0, sizeof t->w[k].dw);
        if (!backward || query) continue;
        if (k == 0 || !t->job->mixed) GO(t, gmm_gtp_wgrad(t->gtp, t->w[k].bundle, t->stream, &t->w[k].dw));
        if (t->job->mixed)
            GO(t, gmm_gtp_wgrad_part(t->gtp, t->w[k].bundle, t->w[k].first, EXPERTS, &t->w[k].dw));
    }
    config.hidden = HIDDEN;
    config.ffn = FFN;
    config.act.kind = GMM_ACT_SWIGLU;
    config.recipe = t->recipe.kind;
    groups.count = EXPERTS;
    groups.capacity = TOKENS;
    groups.splits = t->sizes[m];
    groups.dtype = GMM_I32;
    groups.tail = GMM_TAIL_ZERO;
    hooks.user = t;
    hooks.need = need;
    hooks.ready = ready;
    quant.recipe = &t->recipe;
    quant.random = t->random;
    mlp.config = &config;
    mlp.groups = &groups;
    mlp.quant = t->recipe.kind ? &quant : NULL;
    mlp.hooks = &hooks;
    mlp.x = &x, mlp.w1 = &t->w[0].mat, mlp.w2 = &t->w[1].mat, mlp.y = &y;
    if (backward) mlp.dy = &dy, mlp.dx = &dx, mlp.dw1 = &dw[0], mlp.dw2 = &dw[1];
    mlp.saved = t->saved;
    mlp.saved_bytes = t->saved_bytes;
    if (query) {
        GO(t, gmm_mlp_query(t->ctx, op, &mlp, &info));
        if (info.workspace_bytes > t->workspace_bytes) t->workspace_bytes = info.workspace_bytes;
        if (!backward) t->saved_bytes = info.saved_bytes;
        return 0;
    }
    GO(t, (backward ? gmm_mlp_bwd : gmm_mlp_fwd)(t->ctx, &mlp, t->workspace, t->workspace_bytes, t->stream));
    for (int k = 0; k < 2; k++) {
        if (t->w[k].acquired)
            GO(t, gmm_gtp_release(t->gtp, t->w[k].bundle, backward ? GMM_GTP_BACKWARD : GMM_GTP_FORWARD, t->stream));
        t->w[k].acquired = 0;
    }
    return t->process.report->status != GMM_OK;
}

static int open_gtp(trainer *t) {
    gmm_gtp_config config = GMM_ZERO;
    gmm_gtp_domain d = GMM_ZERO;
    gmm_gtp_need n = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    int32_t domain, chain[2];
    float *amax;
    size_t bytes = 0;
    void *memory;
    config.weights = 2 * EXPERTS;
    config.bundles = config.chains = 2;
    config.timeout_ms = t->job->timeout_ms;
    config.ctx = t->ctx;
    if (gmm_gtp_query(&config, &bytes, &error)) return failed(t, error.status, "query", error.text);
    memory = calloc(1, bytes);
    if (gmm_gtp_init(memory, bytes, &config, &t->gtp, &error)) return failed(t, error.status, "init", error.text);
    if (t->process.size > 1) d.gather = &t->comm[0], d.reduce = &t->comm[1];
    d.gather_stream = t->side[0];
    d.reduce_stream = t->side[1];
    d.reduction = t->job->reduction;
    GO(t, gmm_gtp_add_domain(t->gtp, &d, &domain));
    amax = (float *)block(t, 2 * EXPERTS * sizeof *amax, 0xFF);
    if (declare_weight(t, 0, amax) || declare_weight(t, 1, amax) || declare_bundles(t, domain)) return 1;
    for (int pass = 0; pass < 2; pass++) {
        const int32_t order[2] = {t->w[pass].bundle, t->w[1 - pass].bundle};
        gmm_gtp_chain c = GMM_ZERO;
        c.pass = (gmm_gtp_pass)pass;
        c.bundles = order;
        c.count = t->job->mixed ? 1 : 2;
        c.prefetch = 1;
        GO(t, gmm_gtp_add_chain(t->gtp, &c, &chain[pass]));
    }
    GO(t, gmm_gtp_seal(t->gtp));
    GO(t, gmm_gtp_follow(t->gtp, chain[0], chain[1]));
    GO(t, gmm_gtp_memory_need(t->gtp, domain, &n));
    GO(t, gmm_gtp_bind(t->gtp, domain, n.gather_bytes ? block(t, n.gather_bytes, 0xFF) : NULL, n.gather_bytes,
                       n.reduce_bytes ? block(t, n.reduce_bytes, 0xFF) : NULL, n.reduce_bytes));
    return 0;
}

/* Casts the masters to shards, computes all micro-batches of this rank, and subtracts main_grad from the masters. */
static int step(trainer *t, int number_of_step) {
    const int odd = number_of_step == 1 && t->process.rank == 1; /* something befalls it */
    gmm_gtp_quantization q = GMM_ZERO;
    const void *from[2 * EXPERTS];
    int32_t ids[2 * EXPERTS];
    for (int i = 0; i < 2 * EXPERTS; i++) {
        from[i] = t->w[i / EXPERTS].master[i % EXPERTS];
        ids[i] = t->w[i / EXPERTS].ids[i % EXPERTS];
    }
    q.dtype = GMM_F32;
    q.from = from;
    if (!odd || t->job->fate != OUT_OF_STEP)
        GO(t, gmm_gtp_quantize(t->gtp, ids, 2 * EXPERTS, &q, t->stream));
    for (int m = 0; m < t->micro; m++) {
        t->opens = m == 0;
        if (through_mlp(t, m, GMM_OP_MLP_FWD, 0)) return 1;
        if (odd && (t->job->fate == KILLED_BETWEEN || t->job->fate == STOPPED)) {
#ifdef HAVE_CUDA
            if (on_gpu(t)) (void)cudaDeviceSynchronize(); /* so that the peer waits for the next collective */
#endif
            (void)raise(t->job->fate == STOPPED ? SIGSTOP : SIGKILL);
        }
        if (through_mlp(t, m, GMM_OP_MLP_BWD, 0)) return 1;
    }
    GO(t, gmm_gtp_fence(t->gtp, GMM_GTP_ALL, t->stream));
    for (int i = 0; i < 2 * EXPERTS; i++) {
        const weight *w = &t->w[i / EXPERTS];
        const gmm_mat x = gmm_mat_packed(GMM_F32, w->main_grad[i % EXPERTS]);
        const gmm_mat y = gmm_mat_packed(GMM_F32, w->master[i % EXPERTS]);
        gmm_accumulation d = GMM_ZERO;
        d.count = 1;
        d.rows = w->plan.shard_rows;
        d.cols = w->plan.local_cols;
        d.x = &x;
        d.y = &y;
        d.scale = -0.01f;
        d.beta = 1;
        GO(t, gmm_accumulate(t->ctx, &d, NULL, 0, t->stream));
    }
    return wait_polled(t);
}

/* Copies the logical rows of this rank, and what its micro-batches gave, to their places among those of all ranks. */
static int report(trainer *t) {
    size_t before = 0;
    for (int i = 0; i < 2 * EXPERTS; i++) {
        const weight *w = &t->w[i / EXPERTS];
        const size_t at = (before + (size_t)(w->plan.row0 * w->plan.local_cols)) * 4;
        const size_t bytes = (size_t)(w->plan.valid_rows * w->plan.local_cols) * 4;
        if (copy(t, t->process.result + at, w->main_grad[i % EXPERTS], bytes) ||
            copy(t, t->process.result + MASTERS + at, w->master[i % EXPERTS], bytes)) return 1;
        before += (size_t)(w->shard.rows * w->shard.cols);
    }
    for (int m = 0; m < t->micro; m++) {
        const size_t bytes = TOKENS * HIDDEN * 2, at = OUTPUTS + (size_t)(2 * (t->first_micro + m)) * bytes;
        if (copy(t, t->process.result + at, t->y[m], bytes) || copy(t, t->process.result + at + bytes, t->dx[m], bytes))
            return 1;
    }
    return 0;
}

static int connect_ranks(trainer *t) {
    if (t->process.size == 1) return 0;
    if (!on_gpu(t)) {
        process_comm(&t->process, &t->comm[0]);
        t->comm[1] = t->comm[0];
        return 0;
    }
    for (int k = 0; k < 2; k++) {
        gmm_peers_config c = GMM_ZERO;
        gmm_error error = GMM_ZERO;
        c.rank = t->process.rank;
        c.size = t->process.size;
        c.processes = 1;
        c.ctx = t->ctx;
        c.exchange = process_exchange;
        c.user = &t->process;
        if (gmm_peers_open(&c, &t->comm[k], &error)) return failed(t, error.status, "gmm_peers_open", error.text);
    }
    return 0;
}

static int train(trainer *t) {
    gmm_config config = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    config.threads = 1;
#ifdef HAVE_CUDA
    if (on_gpu(t)) {
        cudaError_t e;
        config.space = GMM_SPACE_CUDA;
        config.device = t->job->place == ON_GPUS ? t->process.rank : 0;
        e = cudaSetDevice(config.device);
        if (e != cudaSuccess) return failed(t, GMM_E_CUDA, "cudaSetDevice", cudaGetErrorString(e));
    }
#endif
    if (gmm_create(&t->ctx, &config, &error)) return failed(t, error.status, "gmm_create", error.text);
    GO(t, gmm_runtime_of(t->ctx, &t->rt));
    GO(t, t->rt.stream_create(t->rt.self, 0, &t->stream));
    for (int k = 0; k < 2; k++) GO(t, t->rt.stream_create(t->rt.self, -5, &t->side[k]));
    t->recipe = gmm_recipe_of(t->job->recipe);
    t->micro = t->job->micro / t->process.size;
    t->first_micro = t->process.rank * t->micro;
    if (connect_ranks(t) || fill(t) || open_gtp(t) || through_mlp(t, 0, GMM_OP_MLP_FWD, 1) ||
        through_mlp(t, 0, GMM_OP_MLP_BWD, 1)) return 1;
    t->workspace = block(t, t->workspace_bytes + 256, 0xFF);
    t->saved = block(t, t->saved_bytes + 256, 0xFF);
    if (t->process.report->status) return 1;
    for (int s = 0; s < STEPS; s++)
        if (step(t, s)) return 1;
    return report(t);
}

static int rank_program(const char *argument) {
    static trainer t;
    int bad, all[PROCESS_RANKS];
    if (!process_join(&t.process, argument, 0)) return 2;
    t.job = (const job *)t.process.job;
    /* on GPUs the runtime finds who is missing; the start of a rank may take longer than its timeout */
    t.process.timeout_ms = on_gpu(&t) ? 60000 : t.job->timeout_ms;
    if (t.process.rank == 1 && t.job->fate == KILLED_IN_CALL) t.process.fatal_call = t.job->fatal_call;
    bad = train(&t);
#ifdef HAVE_CUDA
    if (on_gpu(&t)) (void)cudaDeviceSynchronize(); /* after a failure too the device must finish */
#endif
    if (bad) return 0; /* the report says why; a peer's memory may be gone */
    if (process_exchange(&t.process, &bad, all, sizeof bad)) return 4; /* no rank frees what another still writes */
    if (gmm_gtp_fini(t.gtp)) return 3;
    for (int k = 0; k < 2 && on_gpu(&t); k++) gmm_peers_close(&t.comm[k]);
    gmm_destroy(t.ctx);
    return 0;
}

/* ------------------------------------------------------------------------------------------------------- Cases --- */

static job plain(place place, gmm_recipe_kind recipe) {
    job j;
    memset(&j, 0, sizeof j);
    j.place = place;
    j.recipe = recipe;
    j.micro = 2;
    j.timeout_ms = 20000;
    return j;
}
static void need_gpus(place place) {
    if (place == ON_CPU) return;
#ifdef HAVE_CUDA
    if (device_emulated()) t_skip("the emulator has no CUDA IPC");
    if (place == ON_GPUS && device_count() < 2) t_skip("needs two GPUs");
#endif
}

/* The argument of a case: where the ranks compute; a recipe or a fate; how many ranks. */
static int case_arg(place place, int what, int ranks) { return (int)place + 4 * what + 64 * ranks; }
static place place_of(int arg) { return (place)(arg % 4); }
static int what_of(int arg) { return arg / 4 % 16; }
static int ranks_of(int arg) { return arg / 64; }

static const char program_name[] = "mlp";

/* Runs the job on `size` ranks that must succeed. Returns the results. */
static unsigned char *results(const job *j, int size) {
    unsigned char *out = (unsigned char *)t_host(RESULT_BYTES);
    process_segment *s = processes_run(program_name, j, sizeof *j, RESULT_BYTES, size, 120);
    for (int i = 0; i < size; i++) {
        const process_report *r = processes_report(s, i);
        T_CHECK(r->done && !r->status, "rank %d of %d %s %s", i, size, r->done ? "failed:" : "did not end:", r->text);
    }
    memcpy(out, processes_result(s), RESULT_BYTES);
    return out;
}

/* g ranks give the bits of one: quantized shards that are gathered, and BF16 ones that the MLP quantizes then; one
   bundle of both weights gives those of two bundles, on one rank too. */
static void equals_one(int arg) {
    job j = plain(place_of(arg), (gmm_recipe_kind)what_of(arg));
    const int size = ranks_of(arg);
    const unsigned char *want;
    float most = 0;
    need_gpus(j.place);
    j.micro = size;
    for (j.rounded = 0; j.rounded < 2; j.rounded++) {
        j.mixed = 0;
        if (j.rounded && j.recipe == GMM_RECIPE_NONE) break;
        j.reduction = j.rounded ? GMM_GTP_REDUCE_EXCHANGE : GMM_GTP_REDUCE_SCATTER;
        want = results(&j, 1);
        for (int i = 0; i < WEIGHT_FLOATS; i++) {
            const float g = ((const float *)(const void *)want)[i];
            if (g > most) most = g;
            T_CHECK(g == g, "gradient %d of one rank is not a number", i);
        }
        T_CHECK(most > 0, "the gradients of one rank are zero");
        for (int i = 0; i < 3; i++) {
            const unsigned char *got;
            j.mixed = i > 0;
            t_about("%s shards, %s", j.rounded ? "BF16" : "quantized", j.mixed ? "one bundle" : "two bundles");
            got = results(&j, i == 1 ? 1 : size);
            t_same("main_grad", got, want, MASTERS);
            t_same("masters", got + MASTERS, want + MASTERS, MASTERS);
            t_same("y and dx", got + OUTPUTS, want + OUTPUTS, RESULT_BYTES - OUTPUTS);
        }
    }
}

/* A rank of two is killed or stopped: the other has the error, with the rank in the text, long before anyone waits for
   the end of the program. */
static void ends(int arg) {
    static const int calls[] = {1, 2, 5, 9, 17};
    const place place = place_of(arg);
    const fate fate = (enum fate)what_of(arg);
    need_gpus(place);
    for (int k = 0; k < (fate == KILLED_IN_CALL ? T_COUNT(calls) : 1); k++) {
        job j = plain(place, GMM_RECIPE_FP8_CURRENT);
        const process_segment *s;
        const process_report *r;
        double seconds = -gtp_seconds();
        j.fate = fate;
        j.fatal_call = calls[k];
        if (fate == STOPPED || place != ON_CPU) j.timeout_ms = 2000; /* only a timeout finds it */
        s = processes_run(program_name, &j, sizeof j, RESULT_BYTES, ranks_of(arg), 60);
        seconds += gtp_seconds();
        r = processes_report(s, 0);
        T_CHECK(!processes_report(s, 1)->done, "rank 1 has ended by itself: %s", processes_report(s, 1)->text);
        T_CHECK(r->done && r->status == GMM_E_COMM, "rank 0: %s %s", gmm_status_name(r->status), r->text);
        T_CHECK(strstr(r->text, "rank 1 of 2 has "), "%s", r->text);
        if (place == ON_CPU)
            T_CHECK(strstr(r->text, fate == STOPPED ? "not joined" : "its process is gone"), "%s", r->text);
        T_CHECK(place != ON_CPU || seconds < (fate == STOPPED ? 30 : 15), "it took %.1f s", seconds);
        T_CHECK(place == ON_CPU || r->seconds < 10, "the error came after %.1f s", r->seconds);
        if (T.verbose) printf("        %.2f s: %s\n", seconds, r->text);
    }
}

/* Ranks that differ in a call get an error that names both calls; nothing hangs. */
static void out_of_step(int arg) {
    job j = plain(ON_CPU, GMM_RECIPE_FP8_CURRENT);
    const process_segment *s;
    (void)arg;
    j.fate = OUT_OF_STEP;
    s = processes_run(program_name, &j, sizeof j, RESULT_BYTES, 2, 60);
    for (int i = 0; i < 2; i++) {
        const process_report *r = processes_report(s, i);
        T_CHECK(r->done && r->status == GMM_E_COMM, "rank %d: %s %s", i, gmm_status_name(r->status), r->text);
        T_CHECK(strstr(r->text, "all_reduce_max 16") && strstr(r->text, "reduce_scatter"), "rank %d: %s", i, r->text);
    }
}

void tests_gtp_processes(void) {
    static const char *const places[] = {"shared memory", "CUDA IPC on one GPU", "CUDA IPC on a GPU each"};
    static const char *const fates[] = {"", "a rank killed in a call", "a rank killed between calls", "a rank stopped"};
    t_add_rank_program(program_name, rank_program);
    for (int p = ON_CPU; p <= ON_GPUS; p++) {
        for (int kind = GMM_RECIPE_NONE; kind <= GMM_RECIPE_NVFP4; kind++)
            (p == ON_CPU ? t_add_host : t_add_gpu_alone)(equals_one, case_arg((place)p, kind, 2),
                                                         "gtp processes: %s equals one rank, %s", places[p],
                                                         kind ? ref_recipe_name((gmm_recipe_kind)kind) : "bf16");
        for (int f = KILLED_IN_CALL; f <= STOPPED; f++)
            if (p == ON_CPU || f != KILLED_IN_CALL)
                (p == ON_CPU ? t_add_host : t_add_gpu_alone)(ends, case_arg((place)p, f, 2), "gtp processes: %s, %s",
                                                             places[p], fates[f]);
    }
    t_add_host(out_of_step, 0, "gtp processes: shared memory, a rank out of step");
    t_add_host(equals_one, case_arg(ON_CPU, GMM_RECIPE_MXFP8, 4), "gtp processes: four ranks over shared memory");
}
#else
static void absent(int arg) {
    (void)arg;
    t_skip("no POSIX threads");
}
void tests_gtp_processes(void) { t_add_host(absent, 0, "gtp processes: ranks that are processes"); }
#endif
