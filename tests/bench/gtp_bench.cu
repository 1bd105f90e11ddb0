/* gtp_bench - the cost of weight gathers and gradient reductions beside the GEMMs, on the GPUs of one host: one thread
   per GPU runs a chain of grouped linear layers through the GTP runtime over NCCL and peer copies. Exposed time is the
   time of a layer minus that of the same layer with communicators that do nothing, in the steady state, where the first
   layer's gather is hidden by the last layer; it is given as a fraction of t_ref, the time of that collective alone in
   one plain NCCL call. What the numbers mean: README.md. */
#include "gmm_gtp.h"

#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 8, LAYERS = 8, EXPERTS = 8, STEPS = 24, SPANS = 512 };
enum { AUTO = -1 }; /* SMs of a GEMM: all but gmm_gtp_view.leave */
enum { K_GEMM, K_GATHER, K_REDUCE, KINDS };
enum { FORWARD = 1, BACKWARD = 2, FENCE = 4 }; /* phases of a step */
/* The part of a collective that runs: all of it, nothing, the copy of a rank's own part, all but that copy. */
typedef enum part { WHOLE, NOTHING, OWN, OTHERS } part;
typedef struct variant { const char *name; part gather, reduce; int sums; } variant;
static const variant ALL = {"gather, reduce", WHOLE, WHOLE, 1}, NO_REDUCE = {"gather", WHOLE, NOTHING, 1},
                     NONE = {"no communication", NOTHING, NOTHING, 1}, BARE = {"nor sums", NOTHING, NOTHING, 0};
static const char *const KIND[KINDS] = {"compute", "gather", "reduce"};
typedef enum way { PLAIN, WINDOWS, ENGINES, PEERS, WAYS } way;
static const char *const WAY[WAYS] = {"nccl", "nccl-windows", "nccl-engines", "peers"}; /* engines: CTA policy zero */

typedef struct shape { const char *name; int experts; int64_t n, k, tokens; } shape;
static const shape SHAPES[] = {{"dsv3", 8, 4096, 7168, 16384}, {"dsv3/8k", 8, 4096, 7168, 8192},
                               {"mixtral", 8, 28672, 4096, 16384}, {"small", 8, 1024, 2048, 16384}};
static const int LIMITS[] = {AUTO, 0, 124, 116};

static struct options {
    const char *shapes, *ways, *limits, *wires, *explain, *json;
    int layers, steps, ranks, prefetch, backward, alone;
} O = {"dsv3", "", "", "f32", "none", NULL, 4, 12, 0, 0, 1, 1};

static void die(const char *what, const char *why) {
    fprintf(stderr, "gtp_bench: %s: %s\n", what, why);
    exit(1);
}
#define CU(call) do { cudaError_t e_ = (call); if (e_) die(#call, cudaGetErrorString(e_)); } while (0)
#define NC(call) do { ncclResult_t e_ = (call); if (e_) die(#call, ncclGetErrorString(e_)); } while (0)

/* ------------------------------------------------------------------------------------------------- Meetings --- */

static struct hub {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int size, came, turn;
    char slots[RANKS][256], all[RANKS][256];
} H = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, {{0}}, {{0}}};

static gmm_status meet(void *user, const void *mine, void *all, size_t bytes) {
    const int rank = *(const int *)user;
    int turn, i;
    pthread_mutex_lock(&H.mutex);
    memcpy(H.slots[rank], mine, bytes);
    turn = H.turn;
    if (++H.came == H.size) {
        memcpy(H.all, H.slots, sizeof H.all);
        H.came = 0;
        H.turn++;
        pthread_cond_broadcast(&H.changed);
    }
    while (turn == H.turn) pthread_cond_wait(&H.changed, &H.mutex);
    for (i = 0; i < H.size; i++) memcpy((char *)all + (size_t)i * bytes, H.all[i], bytes);
    pthread_mutex_unlock(&H.mutex);
    return GMM_OK;
}

/* ---------------------------------------------------------------------------------------------------- Ranks --- */

typedef struct span { cudaEvent_t begin, end; int kind, op; } span;
struct rank;
typedef struct muted { struct rank *rank; gmm_comm inner; int kind, open; cudaStream_t stream; } muted;

typedef struct rank {
    int index;
    gmm_context *ctx;
    gmm_runtime rt;
    cudaStream_t compute, side[2];
    ncclComm_t nccl[2][2];     /* [usual, copy engines][gather, reduce] */
    const shape *shape;
    way way;
    int depth, limit, processors, layers;
    variant now;
    gmm_dtype wire;
    gmm_comm comm[2];
    muted muted[2];
    void *shard_window;
    gmm_gtp *gtp;
    void *memory, *gather, *reduce;
    gmm_gtp_need need;
    gmm_shard_plan plan;
    uint16_t *shards, *x, *y, *dy;
    float *grads;
    int32_t *sizes;
    void *workspace;
    size_t workspace_bytes;
    int32_t bundle[LAYERS], chain[2], domain;
    span spans[SPANS];
    int span_count;
    cudaEvent_t step[STEPS + 1];
    unsigned long long *clock;   /* [STEPS + 1][multiprocessors][cycles, nanoseconds], on the host */
    float rates[2];              /* bytes/s of a gather alone, and of a sum */
} rank;

static void gtp(rank *r, gmm_status s, const char *call) {
    if (s) die(call, r->gtp ? gmm_gtp_last_error(r->gtp) : gmm_last_error(r->ctx));
}
#define GT(call) gtp(r, call, #call)

static void sync_all(rank *r) {
    char mine = 0, all[RANKS];
    CU(cudaDeviceSynchronize());
    (void)meet(&r->index, &mine, all, 1);
}

static __global__ void noise(uint16_t *to, size_t n, uint32_t seed, float scale) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ seed;
        h = (h ^ (h >> 15)) * 2246822519u;
        h = (h ^ (h >> 13)) * 3266489917u;
        to[i] = gmm_f32_to_bf16(scale * ((float)((h ^ (h >> 16)) & 0xffff) / 32768.0f - 1.0f));
    }
}
static void *take(rank *r, size_t bytes) {
    void *p = NULL;
    bytes = (bytes + 4095) / 4096 * 4096;
    if (r->way == WINDOWS || r->way == ENGINES) NC(ncclMemAlloc(&p, bytes));
    else CU(cudaMalloc(&p, bytes));
    return p;
}
static void untake(rank *r, void *p) {
    if (r->way == WINDOWS || r->way == ENGINES) NC(ncclMemFree(p));
    else CU(cudaFree(p));
}
static size_t shard_values(const rank *r) { return (size_t)r->plan.shard_rows * (size_t)r->shape->k; }

/* Communicators that may skip their work, and that record when they begin and end. */
static span *open_span(rank *r, int kind, int op, cudaStream_t stream) {
    span *s = &r->spans[r->span_count % SPANS];
    r->span_count++;
    s->kind = kind;
    s->op = op;
    if (!s->begin) CU(cudaEventCreate(&s->begin));
    if (!s->end) CU(cudaEventCreate(&s->end));
    CU(cudaEventRecord(s->begin, stream));
    return s;
}
static span *last_of[RANKS][KINDS];
static part left(const muted *m) { return m->kind == K_GATHER ? m->rank->now.gather : m->rank->now.reduce; }
static int silent(const muted *m) { return left(m) == NOTHING || left(m) == OWN; }
/* Only the copy of a rank's own part. */
static gmm_status own(const muted *m, const void *send, void *recv, size_t n, int parts, gmm_stream t) {
    char *to = (char *)recv + (size_t)m->rank->index * n;
    if (left(m) == OWN)
        CU(cudaMemcpyAsync(to, (const char *)send + (parts ? (size_t)m->rank->index * n : 0), n,
                           cudaMemcpyDeviceToDevice, (cudaStream_t)t));
    return GMM_OK;
}
static gmm_status m_begin(void *self, const char *what) {
    muted *m = (muted *)self;
    m->open = 1;
    m->stream = NULL;
    return silent(m) ? GMM_OK : m->inner.group_begin(m->inner.self, what);
}
static void m_note(muted *m, gmm_stream stream) {
    if (m->stream || silent(m)) return;
    m->stream = stream;
    last_of[m->rank->index][m->kind] = open_span(m->rank, m->kind, 0, stream);
}
static gmm_status m_end(void *self) {
    muted *m = (muted *)self;
    gmm_status s;
    m->open = 0;
    if (silent(m)) return GMM_OK;
    s = m->inner.group_end(m->inner.self);
    if (m->stream) CU(cudaEventRecord(last_of[m->rank->index][m->kind]->end, m->stream));
    return s;
}
static gmm_status m_gather(void *self, const void *a, void *b, size_t n, gmm_stream t) {
    muted *m = (muted *)self;
    m_note(m, t);
    if (silent(m)) return own(m, a, b, n, 0, t);
    if (left(m) == OTHERS) a = (char *)b + (size_t)m->rank->index * n;
    return m->inner.all_gather(m->inner.self, a, b, n, t);
}
static gmm_status m_scatter(void *self, const void *a, void *b, size_t n, gmm_dtype d, gmm_stream t) {
    muted *m = (muted *)self;
    m_note(m, t);
    return silent(m) ? GMM_OK : m->inner.reduce_scatter(m->inner.self, a, b, n, d, t);
}
static gmm_status m_exchange(void *self, const void *a, void *b, size_t n, gmm_stream t) {
    muted *m = (muted *)self;
    m_note(m, t);
    return silent(m) ? own(m, a, b, n, 1, t) : m->inner.all_to_all(m->inner.self, a, b, n, t);
}
static gmm_status m_max(void *self, float *v, size_t n, gmm_stream t) {
    muted *m = (muted *)self;
    return m->inner.all_reduce_max(m->inner.self, v, n, t);
}
static gmm_status m_add(void *self, void *base, size_t bytes, void **window) {
    muted *m = (muted *)self;
    return m->inner.window_add(m->inner.self, base, bytes, window);
}
static gmm_status m_remove(void *self, void *window) {
    muted *m = (muted *)self;
    return m->inner.window_remove(m->inner.self, window);
}
static gmm_status m_poll(void *self, gmm_error *e) {
    muted *m = (muted *)self;
    return m->inner.poll(m->inner.self, e);
}
static void m_give_up(void *self, const char *why) {
    muted *m = (muted *)self;
    m->inner.give_up(m->inner.self, why);
}

static void connect_rank(rank *r) {
    gmm_error error = GMM_ZERO;
    for (int k = 0; k < 2; k++) {
        gmm_comm *c = &r->comm[k];
        if (r->way == PEERS) {
            gmm_peers_config config = GMM_ZERO;
            config.rank = r->index;
            config.size = H.size;
            config.ctx = r->ctx;
            config.exchange = meet;
            config.user = &r->index;
            if (gmm_peers_open(&config, c, &error)) die("peers", error.text);
        } else {
            gmm_nccl_config config = GMM_ZERO;
            config.comm = r->nccl[r->way == ENGINES][k];
            config.ctx = r->ctx;
            /* which communicator exchanges the parts for the sums */
            config.windows = r->way != PLAIN && (k == 0 || r->way == ENGINES);
            if (gmm_nccl_open(&config, c, &error)) die("nccl", error.text);
        }
        r->muted[k].rank = r;
        r->muted[k].inner = *c;
        r->muted[k].kind = K_GATHER + k;
        c->self = &r->muted[k];
        c->group_begin = m_begin;
        c->group_end = m_end;
        c->all_gather = m_gather;
        c->reduce_scatter = m_scatter;
        c->all_to_all = m_exchange;
        c->all_reduce_max = m_max;
        if (c->window_add) c->window_add = m_add;
        if (c->window_remove) c->window_remove = m_remove;
        c->poll = m_poll;
        c->give_up = m_give_up;
    }
}

static gmm_linear linear_of(const rank *r, gmm_groups *g, gmm_options *o, int leave) {
    gmm_linear d = GMM_ZERO;
    memset(g, 0, sizeof *g);
    memset(o, 0, sizeof *o);
    g->count = r->shape->experts;
    g->capacity = r->shape->tokens;
    g->splits = r->sizes;
    g->dtype = GMM_I32;
    o->sm_limit = r->limit != AUTO ? r->limit : leave ? r->processors - leave : 0;
    d.in_features = r->shape->k;
    d.out_features = r->shape->n;
    d.groups = g;
    d.options = o;
    return d;
}

static void declare(rank *r) {
    const shape *s = r->shape;
    gmm_gtp_config config = GMM_ZERO;
    gmm_gtp_domain d = GMM_ZERO;
    gmm_shard shard = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    size_t bytes = 0;
    config.weights = r->layers * s->experts;
    config.bundles = r->layers;
    config.chains = 2;
    config.ctx = r->ctx;
    if (gmm_gtp_query(&config, &bytes, &error)) die("query", error.text);
    r->memory = calloc(1, bytes);
    if (gmm_gtp_init(r->memory, bytes, &config, &r->gtp, &error)) die("init", error.text);
    shard.dtype = GMM_BF16;
    shard.rows = s->n;
    shard.cols = s->k;
    shard.gtp_size = H.size;
    shard.gtp_rank = r->index;
    if (gmm_gtp_plan(&shard, &r->plan, &error)) die("plan", error.text);
    r->shards = (uint16_t *)take(r, (size_t)(r->layers * s->experts) * shard_values(r) * 2);
    r->grads = (float *)take(r, (size_t)(r->layers * s->experts) * shard_values(r) * 4);
    noise<<<1024, 256>>>(r->shards, (size_t)(r->layers * s->experts) * shard_values(r), 7u + (uint32_t)r->index, 0.02f);
    CU(cudaMemset(r->grads, 0, (size_t)(r->layers * s->experts) * shard_values(r) * 4));
    d.gather = &r->comm[0];
    d.reduce = &r->comm[1];
    d.gather_stream = r->side[0];
    d.reduce_stream = r->side[1];
    d.wire = r->wire;
    if (r->way == ENGINES) d.reduction = GMM_GTP_REDUCE_EXCHANGE;
    GT(gmm_gtp_add_domain(r->gtp, &d, &r->domain));
    for (int l = 0; l < r->layers; l++) {
        int32_t ids[EXPERTS];
        for (int e = 0; e < s->experts; e++) {
            gmm_gtp_weight w = GMM_ZERO;
            const size_t at = (size_t)(l * s->experts + e) * shard_values(r);
            w.expert = e;
            w.shard = &shard;
            w.data[0] = r->shards + at;
            w.main_grad = r->grads + at;
            w.main_grad_dtype = GMM_F32;
            GT(gmm_gtp_add_weight(r->gtp, &w, &ids[e]));
        }
        GT(gmm_gtp_add_bundle(r->gtp, r->domain, ids, s->experts, "layer", &r->bundle[l]));
    }
    for (int pass = 0; pass < 2; pass++) {
        gmm_gtp_chain chain = GMM_ZERO;
        int32_t list[LAYERS];
        for (int l = 0; l < r->layers; l++) list[l] = r->bundle[pass ? r->layers - 1 - l : l];
        chain.pass = (gmm_gtp_pass)pass;
        chain.bundles = list;
        chain.count = r->layers;
        chain.prefetch = r->depth;
        GT(gmm_gtp_add_chain(r->gtp, &chain, &r->chain[pass]));
        /* the chain follows itself, which may need one more slot */
        GT(gmm_gtp_follow(r->gtp, r->chain[pass], r->chain[pass]));
    }
    GT(gmm_gtp_seal(r->gtp));
    GT(gmm_gtp_memory_need(r->gtp, r->domain, &r->need));
    r->need.gather_bytes = (r->need.gather_bytes + 4095) / 4096 * 4096;
    r->need.reduce_bytes = (r->need.reduce_bytes + 4095) / 4096 * 4096;
    r->gather = take(r, r->need.gather_bytes);
    r->reduce = take(r, r->need.reduce_bytes);
    noise<<<1024, 256>>>((uint16_t *)r->gather, r->need.gather_bytes / 2, 3u, 0.02f);
    CU(cudaMemset(r->reduce, 0, r->need.reduce_bytes));
    sync_all(r);
    r->shard_window = NULL;
    if (r->comm[0].window_add && r->way != PEERS) {
        const size_t size = (size_t)(r->layers * s->experts) * shard_values(r) * 2;
        GT(r->comm[0].window_add(r->comm[0].self, r->shards, (size + 4095) / 4096 * 4096, &r->shard_window));
    }
    r->now = ALL;
    GT(gmm_gtp_bind(r->gtp, r->domain, r->gather, r->need.gather_bytes, r->reduce, r->need.reduce_bytes));
}
static void undeclare(rank *r) {
    sync_all(r);
    if (r->shard_window) GT(r->comm[0].window_remove(r->comm[0].self, r->shard_window));
    GT(gmm_gtp_fini(r->gtp));
    sync_all(r);
    untake(r, r->shards);
    untake(r, r->grads);
    untake(r, r->gather);
    untake(r, r->reduce);
    free(r->memory);
    r->gtp = NULL;
}

/* ---------------------------------------------------------------------------------------------------- Steps --- */

static void gemm(rank *r, int op, const gmm_mat *w, int leave) {
    gmm_groups g;
    gmm_options o;
    gmm_linear d = linear_of(r, &g, &o, leave);
    gmm_mat x = gmm_mat_packed(GMM_BF16, r->x), y = gmm_mat_packed(GMM_BF16, r->y);
    gmm_mat dy = gmm_mat_packed(GMM_BF16, r->dy);
    gmm_grad grad = GMM_ZERO;
    span *s = open_span(r, K_GEMM, op, r->compute);
    d.x = &x;
    d.dy = &dy;
    grad.mat = w;
    if (op == 0) d.w = w, d.y = &y, GT(gmm_linear_fwd(r->ctx, &d, r->workspace, r->workspace_bytes, r->compute));
    else if (op == 1) {
        d.w = w;
        d.dx = &y;
        GT(gmm_linear_dgrad(r->ctx, &d, r->workspace, r->workspace_bytes, r->compute));
    } else {
        d.dw = &grad;
        GT(gmm_linear_wgrad(r->ctx, &d, r->workspace, r->workspace_bytes, r->compute));
    }
    CU(cudaEventRecord(s->end, r->compute));
}

static const char *limit_name(const rank *r) {
    static char text[RANKS][16];
    if (r->limit == AUTO) return "auto";
    snprintf(text[r->index], sizeof text[0], "%d", r->limit ? r->limit : r->processors);
    return text[r->index];
}

static void step(rank *r, int what) {
    for (int l = 0; l < r->layers && (what & FORWARD); l++) {
        gmm_gtp_view v = GMM_ZERO;
        GT(gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute, &v));
        gemm(r, 0, &v.mat, v.leave);
        GT(gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute));
    }
    for (int l = r->layers - 1; l >= 0 && (what & BACKWARD); l--) {
        gmm_gtp_view v = GMM_ZERO, dw = GMM_ZERO;
        gmm_gtp_gradient g = GMM_ZERO;
        GT(gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_BACKWARD, r->compute, &v));
        gemm(r, 1, &v.mat, v.leave);
        GT(gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_BACKWARD, r->compute));
        GT(gmm_gtp_wgrad(r->gtp, r->bundle[l], r->compute, &dw));
        gemm(r, 2, &dw.mat, dw.leave);
        g.scale = 1;
        GT(gmm_gtp_submit(r->gtp, r->bundle[l], &g, r->compute));
    }
    if (what & FENCE) GT(gmm_gtp_fence(r->gtp, GMM_GTP_GRADIENTS, r->compute));
}

static int by_value(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}
static float median(float *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n ? v[n / 2] : 0;
}

/* Clock cycles and nanoseconds of every SM that runs a block. */
static __global__ void read_clocks(unsigned long long *to) {
    unsigned sm;
    unsigned long long ns;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    to[2 * sm] = (unsigned long long)clock64();
    to[2 * sm + 1] = ns;
}
static void mark(rank *r, int i) {
    if (!r->step[i]) CU(cudaEventCreate(&r->step[i]));
    read_clocks<<<r->processors, 1, 0, r->compute>>>(r->clock + (size_t)(i * r->processors) * 2);
    CU(cudaEventRecord(r->step[i], r->compute));
}
/* MHz over the steps: for every SM from its first reading to its last. */
static float clock_rate(const rank *r) {
    double sum = 0;
    int n = 0;
    for (int sm = 0; sm < r->processors; sm++) {
        const unsigned long long *first = NULL, *last = NULL;
        for (int i = 0; i <= O.steps; i++) {
            const unsigned long long *at = r->clock + (size_t)(i * r->processors + sm) * 2;
            if (at[1]) last = at, first = first ? first : at;
        }
        if (first == last) continue;
        sum += (double)(last[0] - first[0]) / (double)(last[1] - first[1]) * 1e3;
        n++;
    }
    return n ? (float)(sum / n) : 0;
}
static void set(rank *r, const variant *v) {
    if (r->now.sums != v->sums) GT(gmm_gtp_dry_run(r->gtp, !v->sums)); /* a dry run does no sums */
    r->now = *v;
}
static void chain_on(rank *r, int what) {
    GT(gmm_gtp_follow(r->gtp, r->chain[0], what & BACKWARD ? r->chain[1] : r->chain[0]));
    GT(gmm_gtp_follow(r->gtp, r->chain[1], what & FORWARD ? r->chain[0] : r->chain[1]));
    sync_all(r);
}

/* Median ms of a layer in the steady state, of its GEMMs (forward, dgrad, wgrad), and MHz; on the slowest rank. */
typedef struct timing { float step, gemm[3], mhz; } timing;
static timing measure(rank *r, int what, const variant *v) {
    timing mine, all[RANKS], worst;
    float steps[STEPS], gemms[3][SPANS];
    int n[3] = {0, 0, 0}, first;
    memset(&mine, 0, sizeof mine);
    set(r, v);
    chain_on(r, what);
    memset(r->clock, 0, (size_t)((STEPS + 1) * r->processors) * 2 * sizeof *r->clock);
    for (int i = 0; i < 4; i++) step(r, what);
    first = r->span_count;
    for (int i = 0; i < O.steps; i++) {
        mark(r, i);
        step(r, what);
    }
    mark(r, O.steps);
    GT(gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute));
    CU(cudaDeviceSynchronize());
    for (int i = 0; i < O.steps; i++) CU(cudaEventElapsedTime(&steps[i], r->step[i], r->step[i + 1]));
    first = first > r->span_count - SPANS ? first : r->span_count - SPANS;
    for (int i = first; i < r->span_count; i++) {
        const span *s = &r->spans[i % SPANS];
        if (s->kind == K_GEMM) CU(cudaEventElapsedTime(&gemms[s->op][n[s->op]++], s->begin, s->end));
    }
    mine.mhz = clock_rate(r);
    mine.step = median(steps, O.steps) / (float)r->layers;
    for (int i = 0; i < 3; i++) mine.gemm[i] = median(gemms[i], n[i]);
    (void)meet(&r->index, &mine, all, sizeof mine);
    worst = all[0];
    for (int i = 1; i < H.size; i++) {
        if (all[i].step > worst.step) worst.step = all[i].step;
        if (all[i].mhz < worst.mhz) worst.mhz = all[i].mhz;
        for (int k = 0; k < 3; k++)
            if (all[i].gemm[k] > worst.gemm[k]) worst.gemm[k] = all[i].gemm[k];
    }
    set(r, &ALL);
    return worst;
}

/* Times several variants, forwards and backwards twice, so that a drift of the clock affects all alike. */
static void contend(rank *r, int what, const variant *const *v, int count, timing *t) {
    enum { TURNS = 4 };
    memset(t, 0, (size_t)count * sizeof *t);
    for (int turn = 0; turn < TURNS; turn++)
        for (int i = 0; i < count; i++) {
            const int k = turn % 2 ? count - 1 - i : i;
            const timing one = measure(r, what, v[k]);
            t[k].step += one.step / TURNS;
            t[k].mhz += one.mhz / TURNS;
            for (int g = 0; g < 3; g++) t[k].gemm[g] += one.gemm[g] / TURNS;
        }
}
/* Time of `with` minus that of `without`, and the same at equal clocks: the GPU runs at its power limit, and
   communication takes power from the rest. */
typedef struct exposed { float ms, steady; } exposed;
static exposed expose(const timing *with, const timing *without) {
    exposed x;
    x.ms = with->step - without->step;
    x.steady = without->mhz > 0 ? with->step * with->mhz / without->mhz - without->step : x.ms;
    return x;
}

/* ms of one collective on the side stream, alone: the slowest rank's median. */
typedef void collective(rank *r, void *argument, cudaStream_t stream);
static float alone(rank *r, collective *run, void *argument) {
    float mine, all[RANKS], worst = 0, ms[STEPS];
    cudaEvent_t e[STEPS + 1];
    sync_all(r);
    for (int i = 0; i < 3; i++) run(r, argument, r->side[0]);
    for (int i = 0; i <= STEPS; i++) {
        CU(cudaEventCreate(&e[i]));
        CU(cudaEventRecord(e[i], r->side[0]));
        if (i < STEPS) run(r, argument, r->side[0]);
    }
    CU(cudaDeviceSynchronize());
    for (int i = 0; i < STEPS; i++) CU(cudaEventElapsedTime(&ms[i], e[i], e[i + 1]));
    for (int i = 0; i <= STEPS; i++) CU(cudaEventDestroy(e[i]));
    mine = median(ms, STEPS);
    (void)meet(&r->index, &mine, all, sizeof mine);
    for (int i = 0; i < H.size; i++) worst = all[i] > worst ? all[i] : worst;
    return worst;
}

/* bytes: of a rank, all parts together */
typedef struct buffers { char *send, *recv; size_t bytes; int parts; } buffers;
static void plain_gather(rank *r, void *argument, cudaStream_t stream) {
    const buffers *b = (const buffers *)argument;
    NC(ncclAllGather(b->send, b->recv, b->bytes, ncclInt8, r->nccl[0][0], stream));
}
static void plain_scatter(rank *r, void *argument, cudaStream_t stream) {
    const buffers *b = (const buffers *)argument;
    NC(ncclReduceScatter(b->recv, b->send, b->bytes / 4, ncclFloat32, ncclSum, r->nccl[0][0], stream));
}
static void plain_scatter16(rank *r, void *argument, cudaStream_t stream) {
    const buffers *b = (const buffers *)argument;
    NC(ncclReduceScatter(b->recv, b->send, b->bytes / 2, ncclBfloat16, ncclSum, r->nccl[0][0], stream));
}
static void our_gather(rank *r, void *argument, cudaStream_t stream) {
    const buffers *b = (const buffers *)argument;
    const gmm_comm *c = &r->muted[0].inner;
    const size_t part = b->bytes / (size_t)b->parts;
    GT(c->group_begin(c->self, "gather"));
    for (int i = 0; i < b->parts; i++)
        GT(c->all_gather(c->self, b->send + (size_t)i * part,
                                 b->recv + (size_t)i * part * (size_t)H.size, part, stream));
    GT(c->group_end(c->self));
}
static void our_exchange(rank *r, void *argument, cudaStream_t stream) {
    const buffers *b = (const buffers *)argument;
    const gmm_comm *c = &r->muted[0].inner;
    GT(c->group_begin(c->self, "exchange"));
    GT(c->all_to_all(c->self, b->send, b->recv, b->bytes / (size_t)H.size, stream));
    GT(c->group_end(c->self));
}
static void our_scatter(rank *r, void *argument, cudaStream_t stream) {
    const buffers *b = (const buffers *)argument;
    const gmm_comm *c = &r->muted[0].inner;
    GT(c->group_begin(c->self, "scatter"));
    GT(c->reduce_scatter(c->self, b->recv, b->send, b->bytes / 4, GMM_F32, stream));
    GT(c->group_end(c->self));
}

static FILE *json;
static int entries;
static int wanted(const char *list, const char *name) {
    const size_t n = strlen(name);
    const char *p = list;
    if (!*list) return 1;
    for (; (p = strstr(p, name)) != NULL; p += n)
        if ((p == list || p[-1] == ',') && (p[n] == 0 || p[n] == ',')) return 1;
    return 0;
}

/* Collectives alone. */
static void collectives(rank *r) {
    static const size_t MIB[] = {8, 32, 128, 256, 512};
    if (r->index == 0)
        printf("\nAlone, ms (bus GB/s); one call of so many MiB in all, our gather also in 8 parts\n"
               "%-20s %6s %16s %16s %16s %16s\n", "communicator", "MiB", "all-gather", "in 8 parts", "all-to-all",
               "reduce-scatter");
    for (int w = -1; w < WAYS; w++) {
        void *window[2] = {NULL, NULL};
        buffers b;
        if (w >= 0 && !wanted(O.ways, WAY[w])) continue;
        r->way = w < 0 ? PLAIN : (way)w;
        b.send = (char *)take(r, 512u << 20);
        b.recv = (char *)take(r, 512u << 20);
        noise<<<1024, 256>>>((uint16_t *)(void *)b.send, 256u << 20, 5u, 1.0f);
        noise<<<1024, 256>>>((uint16_t *)(void *)b.recv, 256u << 20, 6u, 1.0f);
        sync_all(r);
        connect_rank(r);
        if (r->comm[0].window_add && w >= 0) {
            GT(r->comm[0].window_add(r->comm[0].self, b.recv, 512u << 20, &window[0]));
            GT(r->comm[0].window_add(r->comm[0].self, b.send, 512u << 20, &window[1]));
        }
        for (size_t i = 0; i < sizeof MIB / sizeof MIB[0]; i++) {
            float ms[4] = {0, 0, 0, 0};
            const double total = (double)(MIB[i] << 20);
            b.bytes = (MIB[i] << 20) / (size_t)H.size;
            b.parts = 1;
            ms[0] = alone(r, w < 0 ? plain_gather : our_gather, &b);
            b.parts = 8;
            if (w >= 0) ms[1] = alone(r, our_gather, &b);
            b.bytes *= (size_t)H.size; /* in an exchange: all that a rank sends */
            if (w >= 0) ms[2] = alone(r, our_exchange, &b);
            b.bytes /= (size_t)H.size;
            ms[3] = alone(r, w < 0 ? plain_scatter : our_scatter, &b);
            if (r->index == 0) {
                printf("%-20s %6d", w < 0 ? "ncclAllGather & co." : WAY[w], (int)MIB[i]);
                for (int k = 0; k < 4; k++) {
                    if (ms[k] > 0) printf("   %7.3f (%4.0f)", ms[k], total * (H.size - 1) / H.size / ms[k] * 1e-6);
                    else printf("   %7s %6s", "-", "");
                }
                printf("\n");
                if (json)
                    fprintf(json, "%s\n  {\"alone\": \"%s\", \"mib\": %d, \"gather\": %.4f, \"parts\": %.4f, "
                            "\"exchange\": %.4f, \"scatter\": %.4f}", entries++ ? "," : "", w < 0 ? "plain" : WAY[w],
                            (int)MIB[i], ms[0], ms[1], ms[2], ms[3]);
            }
        }
        for (int i = 1; i >= 0; i--)
            if (window[i]) GT(r->comm[0].window_remove(r->comm[0].self, window[i]));
        sync_all(r);
        for (int k = 0; k < 2; k++) {
            gmm_comm c = r->muted[k].inner;
            if (w == PEERS) gmm_peers_close(&c);
            else gmm_nccl_close(&c);
        }
        untake(r, b.send);
        untake(r, b.recv);
    }
}

/* The sum of a reduction by exchange, beside a copy. */
static float sum_rate; /* bytes/s */
static void sums(rank *r) {
    const size_t values = 64u << 20;
    char *parts, *sum;
    cudaEvent_t e[3];
    float copy = 0, add = 0;
    if (r->index == 0) {
        CU(cudaMalloc(&parts, values * 4 * (size_t)H.size));
        CU(cudaMalloc(&sum, values * 4));
        noise<<<1024, 256>>>((uint16_t *)(void *)parts, values * 2 * (size_t)H.size, 5u, 1.0f);
        CU(cudaMemset(sum, 0, values * 4));
        for (int i = 0; i < 3; i++) CU(cudaEventCreate(&e[i]));
        for (int bf16 = 0; bf16 < 2; bf16++) {
            const gmm_mat x = gmm_mat_packed(bf16 ? GMM_BF16 : GMM_F32, parts), y = gmm_mat_packed(GMM_F32, sum);
            gmm_accumulation d = GMM_ZERO;
            const double bytes = (double)values * ((bf16 ? 2 : 4) * H.size + 8);
            d.count = H.size;
            d.rows = (int64_t)values / 4096;
            d.cols = 4096;
            d.x = &x;
            d.y = &y;
            d.scale = 0.5f;
            d.beta = 1;
            for (int i = 0; i < 2; i++) {
                CU(cudaEventRecord(e[0], r->compute));
                for (int k = 0; k < 20; k++)
                    CU(cudaMemcpyAsync(sum, parts, values * 4, cudaMemcpyDeviceToDevice, r->compute));
                CU(cudaEventRecord(e[1], r->compute));
                for (int k = 0; k < 20; k++) GT(gmm_accumulate(r->ctx, &d, NULL, 0, r->compute));
                CU(cudaEventRecord(e[2], r->compute));
                CU(cudaDeviceSynchronize());
                CU(cudaEventElapsedTime(&copy, e[0], e[1]));
                CU(cudaEventElapsedTime(&add, e[1], e[2]));
            }
            if (!bf16) sum_rate = (float)(bytes * 20 / add * 1e3);
            printf("%s of %d parts in %s: %.0f GB/s, %.2f of a copy's %.0f GB/s\n",
                   bf16 ? "   and" : "\nSum into main_grad", H.size, bf16 ? "bf16" : "fp32", bytes * 20 / add * 1e-6,
                   bytes / add / ((double)values * 8 / copy), (double)values * 8 * 20 / copy * 1e-6);
        }
        CU(cudaFree(parts));
        CU(cudaFree(sum));
    }
    sync_all(r);
}

/* NCCL without the runtime: a second stream, the next gather enqueued when a GEMM begins, no SM limit. */
static float by_hand(rank *r) {
    const shape *s = r->shape;
    const size_t whole = (size_t)s->experts * (size_t)s->n * (size_t)s->k, part = whole / (size_t)H.size;
    uint16_t *to[2];
    cudaEvent_t there[2], free_[2], at[STEPS * LAYERS + 1];
    float ms[STEPS * LAYERS], mine, all[RANKS], worst = 0;
    const int n = O.steps * r->layers;
    for (int i = 0; i < 2; i++) {
        CU(cudaMalloc(&to[i], whole * 2));
        CU(cudaEventCreateWithFlags(&there[i], cudaEventDisableTiming));
        CU(cudaEventCreateWithFlags(&free_[i], cudaEventDisableTiming));
    }
    for (int i = 0; i <= n; i++) CU(cudaEventCreate(&at[i]));
    sync_all(r);
    for (int i = -3; i < n; i++) {
        const int l = (i + 3) % r->layers, k = (i + 3) & 1;
        gmm_mat w = gmm_mat_packed(GMM_BF16, to[k]);
        if (i == -3) {
            NC(ncclAllGather(r->shards, to[k], part * 2, ncclInt8, r->nccl[0][0], r->side[0]));
            CU(cudaEventRecord(there[k], r->side[0]));
        }
        CU(cudaStreamWaitEvent(r->compute, there[k], 0));
        if (i >= 0) CU(cudaEventRecord(at[i], r->compute));
        CU(cudaEventRecord(free_[k ^ 1], r->compute));
        CU(cudaStreamWaitEvent(r->side[0], free_[k ^ 1], 0));
        NC(ncclAllGather(r->shards + (size_t)((l + 1) % r->layers) * part, to[k ^ 1], part * 2, ncclInt8, r->nccl[0][0],
                         r->side[0]));
        CU(cudaEventRecord(there[k ^ 1], r->side[0]));
        gemm(r, 0, &w, 0);
    }
    CU(cudaStreamWaitEvent(r->compute, there[(n + 3) & 1], 0));
    CU(cudaEventRecord(at[n], r->compute));
    CU(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) CU(cudaEventElapsedTime(&ms[i], at[i], at[i + 1]));
    mine = median(ms, n);
    (void)meet(&r->index, &mine, all, sizeof mine);
    for (int i = 0; i < H.size; i++) worst = all[i] > worst ? all[i] : worst;
    for (int i = 0; i < 2; i++) {
        CU(cudaFree(to[i]));
        CU(cudaEventDestroy(there[i]));
        CU(cudaEventDestroy(free_[i]));
    }
    for (int i = 0; i <= n; i++) CU(cudaEventDestroy(at[i]));
    return worst;
}

/* Records the begin and end of every operation of one step. */
static void timeline(rank *r) {
    cudaEvent_t zero;
    CU(cudaEventCreate(&zero));
    for (int i = 0; i < 2; i++) step(r, FORWARD | BACKWARD);
    sync_all(r);
    r->span_count = 0;
    CU(cudaEventRecord(zero, r->compute));
    step(r, FORWARD | BACKWARD);
    GT(gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute));
    sync_all(r);
    for (int who = 0; who < H.size; who++) {
        for (int i = 0; i < r->span_count && who == r->index && json; i++) {
            const span *s = &r->spans[i];
            float a = 0, b = 0;
            if (cudaEventElapsedTime(&a, zero, s->begin) || cudaEventElapsedTime(&b, zero, s->end)) continue;
            fprintf(json, "%s\n  {\"timeline\": \"%s %s %s, multiprocessors %s, prefetch %d\", \"rank\": %d, "
                    "\"row\": \"%s\", \"begin\": %.4f, \"end\": %.4f}", entries++ ? "," : "", r->shape->name,
                    WAY[r->way], r->wire == GMM_BF16 ? "bf16" : "f32", limit_name(r), r->depth, r->index,
                    KIND[s->kind], a, b);
        }
        sync_all(r);
    }
    CU(cudaEventDestroy(zero));
}

/* Times of a layer's collectives, each in one plain NCCL call. */
typedef struct reference { float gather, scatter[2]; } reference; /* scatter: of f32, of bf16 */

/* A layer with more and more of the communication enabled. */
static void explain(rank *r) {
    static const variant backward[] = {
        {"no comm, no sums", NOTHING, NOTHING, 0}, {"no communication", NOTHING, NOTHING, 1},
        {"own copy of gather", OWN, NOTHING, 1}, {"gather without own", OTHERS, NOTHING, 1},
        {"gather", WHOLE, NOTHING, 1}, {"reduce", NOTHING, WHOLE, 1}, {"gather and reduce", WHOLE, WHOLE, 1},
        {"gather, no sums", WHOLE, NOTHING, 0}};
    for (int pass = 0; pass < 2; pass++) {
        const int what = pass ? BACKWARD : FORWARD, count = pass ? 8 : 4;
        const variant *v[8];
        timing t[8];
        for (int i = 0; i < count; i++) v[i] = &backward[i + !pass];
        contend(r, what, v, count, t);
        for (int i = 0; i < count && r->index == 0; i++)
            printf("  %s %-20s %7.3f ms, %4.0f MHz, %6.3f million cycles; GEMMs %6.3f %6.3f %6.3f\n",
                   pass ? "backward" : "forward ", v[i]->name, t[i].step, t[i].mhz, t[i].step * t[i].mhz * 1e-3,
                   t[i].gemm[0], t[i].gemm[1], t[i].gemm[2]);
    }
}

/* A whole step, compared with the forecast from the rates that were measured here. */
static void foreseen(rank *r) {
    const shape *s = r->shape;
    const timing f = measure(r, FORWARD, &NONE), b = measure(r, BACKWARD, &BARE);
    const timing step = measure(r, FORWARD | BACKWARD | FENCE, &ALL);
    gmm_gtp_forecast c = GMM_ZERO;
    gmm_gtp_stage stages[LAYERS];
    gmm_shard shard = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    memset(stages, 0, sizeof stages);
    shard.dtype = GMM_BF16;
    shard.rows = s->n;
    shard.cols = s->k;
    shard.gtp_size = H.size;
    for (int i = 0; i < r->layers; i++) {
        stages[i].bundle = s->experts;
        stages[i].shard = &shard;
        stages[i].tokens = (double)s->tokens;
    }
    c.stages = r->layers;
    c.gemm_rate = 6.0 * (double)s->tokens * (double)s->n * (double)s->k / ((double)f.step + (double)b.step) * 1e3;
    c.link_rate = r->rates[0];
    c.latency = 15e-6;
    c.memory_rate = r->rates[1];
    c.wire = r->wire;
    c.main_grad = GMM_F32;
    c.prefetch = r->depth;
    c.wrap = 1;
    if (gmm_gtp_foresee(&c, stages, &error)) die("foresee", error.text);
    if (r->index == 0)
        printf("%-18s %4s %2d | step of %d layers, forward, backward, fence: %.3f ms, foreseen %.3f (%.2f): GEMMs %.3f "
               "at %.0f TFLOP/s, exposed gathers %.3f, reductions %.3f; links at %.0f GB/s\n", WAY[r->way],
               limit_name(r), r->depth, r->layers, step.step * (float)r->layers, c.step * 1e3,
               c.step * 1e3 / (step.step * (float)r->layers), c.compute * 1e3, c.gemm_rate * 1e-12,
               c.exposed_gather * 1e3, c.exposed_reduce * 1e3, c.link_rate * 1e-9);
}

/* One communicator, prefetch depth and wire dtype, with every SM limit. */
static void chain(rank *r, const reference *ref) {
    const shape *s = r->shape;
    const int narrow = r->wire == GMM_BF16;
    const float wire = ref->scatter[narrow];
    buffers b;
    connect_rank(r);
    declare(r);
    b.send = (char *)r->shards;
    b.recv = (char *)r->gather;
    b.bytes = (size_t)s->experts * (size_t)s->n * (size_t)s->k * 2 / (size_t)H.size;
    b.parts = s->experts;
    r->rates[1] = alone(r, our_gather, &b);
    if (r->index == 0) printf("%-13s gather of a layer alone %.3f ms\n", WAY[r->way], r->rates[1]);
    r->rates[0] = (float)((double)(b.bytes * (size_t)(H.size - 1)) / r->rates[1] * 1e3);
    r->rates[1] = sum_rate;
    if (r->way == PLAIN && r->depth == 1 && !narrow) {
        timing none;
        float hand;
        r->limit = 0;
        none = measure(r, FORWARD, &NONE);
        hand = by_hand(r);
        if (r->index == 0)
            printf("%-18s %4d %2d | %7.3f %7.3f %7.3f (%3.0f%%)\n", "ncclAllGather", 132, 1, hand, none.step,
                   hand - none.step, (hand - none.step) / ref->gather * 100);
    }
    for (size_t i = 0; i < sizeof LIMITS / sizeof LIMITS[0]; i++) {
        static const variant *const ways[] = {&ALL, &NO_REDUCE, &NONE}, *const forward[] = {&ALL, &NONE};
        timing f[2], b2[3];
        exposed x[3];
        r->limit = LIMITS[i];
        if (!wanted(O.limits, limit_name(r))) continue;
        contend(r, FORWARD, forward, 2, f);
        memset(b2, 0, sizeof b2);
        if (O.backward) contend(r, BACKWARD, ways, 3, b2);
        x[0] = expose(&f[0], &f[1]);
        x[1] = expose(&b2[1], &b2[2]);
        x[2] = expose(&b2[0], &b2[1]);
        if (r->index == 0) {
            const float g = ref->gather / 100, w = wire / 100;
            printf("%-13s %-4s %4s %2d | %7.3f %7.3f %7.3f (%3.0f%% %3.0f%%) %5.1f%% | ", WAY[r->way],
                   narrow ? "bf16" : "f32", limit_name(r), r->depth, f[0].step, f[1].step, x[0].ms, x[0].ms / g,
                   x[0].steady / g, (f[0].gemm[0] / f[1].gemm[0] - 1) * 100);
            printf("%7.3f %7.3f gather %7.3f (%3.0f%% %3.0f%%) reduce %7.3f (%3.0f%% %3.0f%%) | "
                   "%4.0f %4.0f, %4.0f %4.0f %4.0f MHz\n",
                   b2[0].step, b2[2].step, x[1].ms, x[1].ms / g, x[1].steady / g,
                   x[2].ms, x[2].ms / w, x[2].steady / w, f[0].mhz, f[1].mhz, b2[0].mhz, b2[1].mhz, b2[2].mhz);
            fflush(stdout);
            if (json)
                fprintf(json, "%s\n  {\"chain\": \"%s\", \"way\": \"%s\", \"wire\": \"%s\", \"sms\": \"%s\", "
                        "\"prefetch\": %d, \"forward\": %.4f, \"forward_null\": %.4f, \"backward\": %.4f, "
                        "\"backward_no_reduce\": %.4f, \"backward_null\": %.4f, \"t_gather\": %.4f, "
                        "\"t_scatter\": %.4f}", entries++ ? "," : "", s->name, WAY[r->way], narrow ? "bf16" : "f32",
                        limit_name(r), r->depth, f[0].step, f[1].step, b2[0].step, b2[1].step, b2[2].step,
                        ref->gather, wire);
        }
        if (wanted(O.explain, WAY[r->way])) explain(r);
        if (r->depth == 1 && r->limit <= 0 && (r->way == PLAIN || r->way >= ENGINES) && O.backward) {
            if (json) timeline(r);
            foreseen(r);
        }
    }
    undeclare(r);
    for (int k = 0; k < 2; k++) {
        gmm_comm c = r->muted[k].inner;
        if (r->way == PEERS) gmm_peers_close(&c);
        else gmm_nccl_close(&c);
    }
}

static void chains(rank *r) {
    const shape *s = r->shape;
    const size_t whole = (size_t)s->experts * (size_t)s->n * (size_t)s->k;
    reference ref;
    buffers b;
    r->way = PLAIN;
    b.send = (char *)take(r, whole * 4 / (size_t)H.size);
    b.recv = (char *)take(r, whole * 4);
    b.bytes = whole * 2 / (size_t)H.size;
    ref.gather = alone(r, plain_gather, &b);
    ref.scatter[1] = alone(r, plain_scatter16, &b);
    b.bytes *= 2;
    ref.scatter[0] = alone(r, plain_scatter, &b);
    untake(r, b.send);
    untake(r, b.recv);
    CU(cudaMalloc(&r->x, (size_t)s->tokens * (size_t)s->k * 2));
    CU(cudaMalloc(&r->dy, (size_t)s->tokens * (size_t)s->n * 2));
    CU(cudaMalloc(&r->y, (size_t)s->tokens * (size_t)(s->n > s->k ? s->n : s->k) * 2));
    CU(cudaMalloc(&r->sizes, EXPERTS * sizeof *r->sizes));
    noise<<<1024, 256>>>(r->x, (size_t)s->tokens * (size_t)s->k, 11u, 1.0f);
    noise<<<1024, 256>>>(r->dy, (size_t)s->tokens * (size_t)s->n, 12u, 1.0f);
    {
        int32_t sizes[EXPERTS];
        for (int e = 0; e < s->experts; e++) sizes[e] = (int32_t)(s->tokens / s->experts);
        CU(cudaMemcpy(r->sizes, sizes, sizeof sizes, cudaMemcpyHostToDevice));
    }
    r->workspace_bytes = 64u << 20;
    CU(cudaMalloc(&r->workspace, r->workspace_bytes));
    if (r->index == 0)
        printf("\n%s: %d layers of %d experts %lld x %lld, %lld tokens a rank, %d ranks. t_ref: all-gather of %.0f MB "
               "%.3f ms, reduce-scatter fp32 %.3f, bf16 %.3f\n"
               "per layer, ms, and without communication; exposed: ms, %% of t_ref, the same at one clock; slower: "
               "GEMMs by their events\n"
               "%-13s %-4s %4s %2s | %7s %7s %19s %6s | %7s %7s %s\n", s->name, r->layers, s->experts,
               (long long)s->n, (long long)s->k, (long long)s->tokens, H.size, (double)whole * 2e-6, ref.gather,
               ref.scatter[0], ref.scatter[1], "communicator", "wire", "sms", "pf", "forward", "without", "exposed",
               "slower", "backward", "without", "exposed");
    for (int w = 0; w < WAYS; w++)
        for (r->depth = 1; r->depth <= 2; r->depth++)
            for (int narrow = 0; narrow < 2; narrow++) {
                r->way = (way)w;
                r->wire = narrow ? GMM_BF16 : GMM_F32;
                if (!wanted(O.ways, WAY[w]) || !wanted(O.wires, narrow ? "bf16" : "f32")) continue;
                if (O.prefetch && r->depth != O.prefetch) continue;
                chain(r, &ref);
            }
    CU(cudaFree(r->x));
    CU(cudaFree(r->dy));
    CU(cudaFree(r->y));
    CU(cudaFree(r->sizes));
    CU(cudaFree(r->workspace));
}

static ncclUniqueId ids[4];
static void *program(void *argument) {
    rank *r = (rank *)argument;
    gmm_config config = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    int low = 0, high = 0;
    config.space = GMM_SPACE_CUDA;
    config.device = r->index;
    CU(cudaSetDevice(r->index));
    if (gmm_create(&r->ctx, &config, &error)) die("gmm_create", error.text);
    (void)gmm_runtime_of(r->ctx, &r->rt);
    CU(cudaDeviceGetAttribute(&r->processors, cudaDevAttrMultiProcessorCount, r->index));
    CU(cudaDeviceGetStreamPriorityRange(&low, &high));
    CU(cudaStreamCreateWithPriority(&r->compute, cudaStreamNonBlocking, low));
    for (int i = 0; i < 2; i++) CU(cudaStreamCreateWithPriority(&r->side[i], cudaStreamNonBlocking, high));
    for (int i = 0; i < 4; i++) {
        ncclConfig_t c = NCCL_CONFIG_INITIALIZER;
        c.CTAPolicy = i >= 2 ? NCCL_CTA_POLICY_ZERO : NCCL_CTA_POLICY_DEFAULT;
        NC(ncclCommInitRankConfig(&r->nccl[i / 2][i % 2], H.size, ids[i], r->index, &c));
    }
    r->layers = O.layers;
    CU(cudaMallocHost(&r->clock, (size_t)((STEPS + 1) * r->processors) * 2 * sizeof *r->clock));
    if (O.alone) collectives(r);
    sums(r);
    for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++)
        if (wanted(O.shapes, SHAPES[i].name)) {
            r->shape = &SHAPES[i];
            chains(r);
        }
    sync_all(r);
    for (int i = 0; i < 4; i++) NC(ncclCommDestroy(r->nccl[i / 2][i % 2]));
    gmm_destroy(r->ctx);
    return NULL;
}

int main(int argc, char **argv) {
    static rank ranks[RANKS];
    pthread_t threads[RANKS];
    const char *nvls = getenv("NCCL_NVLS_ENABLE");
    struct cudaDeviceProp prop;
    int count = 0, version = 0;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "--shapes=", 9)) O.shapes = argv[i] + 9;
        else if (!strncmp(argv[i], "--ways=", 7)) O.ways = argv[i] + 7;
        else if (!strncmp(argv[i], "--layers=", 9)) O.layers = atoi(argv[i] + 9);
        else if (!strncmp(argv[i], "--steps=", 8)) O.steps = atoi(argv[i] + 8);
        else if (!strncmp(argv[i], "--prefetch=", 11)) O.prefetch = atoi(argv[i] + 11);
        else if (!strncmp(argv[i], "--ranks=", 8)) O.ranks = atoi(argv[i] + 8);
        else if (!strncmp(argv[i], "--json=", 7)) O.json = argv[i] + 7;
        else if (!strncmp(argv[i], "--sms=", 6)) O.limits = argv[i] + 6;
        else if (!strncmp(argv[i], "--wires=", 8)) O.wires = argv[i] + 8;
        else if (!strncmp(argv[i], "--explain=", 10)) O.explain = argv[i] + 10;
        else if (!strcmp(argv[i], "--no-alone")) O.alone = 0;
        else if (!strcmp(argv[i], "--forward")) O.backward = 0;
        else {
            printf("usage: gtp_bench [--shapes=dsv3,dsv3/8k,mixtral,small] [--ways=LIST] [--wires=f32,bf16]\n"
                   "                 [--layers=4|6|8] [--steps=12] [--prefetch=1|2] [--sms=auto,132,124,116]\n"
                   "                 [--ranks=N] [--forward] [--no-alone] [--explain=WAYS] [--json=FILE]\n"
                   "ways: nccl, nccl-windows, nccl-engines, peers\n");
            return strcmp(argv[i], "--help") != 0;
        }
    }
    if (!nvls || strcmp(nvls, "0")) die("NCCL_NVLS_ENABLE", "must be 0: NVLink multicast stays off");
    if (O.layers < 4 || O.layers > LAYERS || O.layers % 2 || O.steps < 1 || O.steps > STEPS)
        die("--layers, --steps", "4, 6 or 8: of an odd number in a circle two neighbours share a gradient's buffer; "
            "1 to 24");
    CU(cudaGetDeviceCount(&count));
    H.size = O.ranks ? O.ranks : count > RANKS ? (int)RANKS : count;
    if (H.size < 2 || H.size > count) {
        printf("gtp_bench: needs two GPUs, there %s %d\n", count == 1 ? "is" : "are", count);
        return 0;
    }
    CU(cudaGetDeviceProperties(&prop, 0));
    NC(ncclGetVersion(&version));
    for (int i = 0; i < 4; i++) NC(ncclGetUniqueId(&ids[i]));
    if (O.json && !(json = fopen(O.json, "w"))) die(O.json, "cannot be written");
    if (json) fprintf(json, "{\"gpu\": \"%s\", \"ranks\": %d, \"nccl\": %d, \"rows\": [", prop.name, H.size, version);
    printf("%d x %s, NCCL %d.%d.%d, NVLink multicast off\n", H.size, prop.name, version / 10000, version / 100 % 100,
           version % 100);
    for (int i = 0; i < H.size; i++) {
        ranks[i].index = i;
        if (pthread_create(&threads[i], NULL, program, &ranks[i])) die("pthread_create", "failed");
    }
    for (int i = 0; i < H.size; i++) pthread_join(threads[i], NULL);
    if (json) {
        fprintf(json, "\n]}\n");
        fclose(json);
    }
    return 0;
}
