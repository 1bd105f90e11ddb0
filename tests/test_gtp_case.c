/* test_gtp_case.c - the training run of gtp_case.h */
#include "gtp_case.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum kind { ACQUIRE, USE, RELEASE, WGRAD, WRITE, SUBMIT, STRAY, FENCE, OPTIMIZE, PUBLISH, FOLLOW } kind;
typedef struct op { kind kind; int layer, pass, micro, consume, step; } op;

struct run;
struct rank;
typedef struct traced_comm {
    struct rank *rank;
    gmm_comm inner;
} traced_comm;

typedef struct rank {
    struct run *run;
    int index, at;               /* at: next operation of the program */
    gmm_context *ctx;
    gmm_runtime rt;
    gtp_trace trace;
    gmm_comm comm[2];
    traced_comm watch[2];
    gmm_gtp *gtp;
    void *memory, *gather, *reduce;
    gmm_stream compute[2], side[2];
    uint16_t *shard[CASE_LAYERS][CASE_EXPERTS];
    void *grad[CASE_LAYERS][CASE_EXPERTS];
    uint16_t *caller_gradients[CASE_LAYERS];
    gmm_shard_plan plan[CASE_LAYERS];
    int32_t weight[CASE_LAYERS][CASE_EXPERTS], bundle[CASE_LAYERS], chain[GMM_GTP_PASSES];
    gmm_gtp_view view[CASE_LAYERS][GMM_GTP_PASSES], wgrad[CASE_LAYERS];
    int version, due[CASE_LAYERS]; /* due: new shards of the optimizer are not yet published */
    int64_t asked, reported, communications, groups, exchanges;
    const void *first[CASE_LAYERS][GMM_GTP_PASSES + 1];
    size_t gather_bytes, reduce_bytes;
    uint64_t last;                 /* hash of the rank's memory when its runtime object failed */
    gmm_status status;
    char text[512];
} rank;

static gmm_status enqueue(rank *r, const char *name, gmm_status (*function)(const void *, gmm_stream), const op *o,
                          const gmm_mat *mat, const gmm_range *ranges, int count, gmm_stream stream);

typedef struct run {
    const gtp_case *c;
    gmm_ranks *ranks;
    rank rank[CASE_RANKS];
    op *program;
    int ops, op_capacity;
    int64_t *reference;          /* [steps + 1][layers][experts][most rows][cols] */
    atomic_llong wrong;
    char first_wrong[200];
    uint64_t random;
} run;

static int rows_of(const gtp_case *c, int layer) { return c->taller >> layer & 1 ? 4 * c->rows : c->rows; }
static size_t main_grad_bytes(const gtp_case *c) { return c->main_grad == GMM_BF16 ? 2 : 4; }
static int consumes(const gtp_case *c) { return c->consumes ? c->consumes : 1; }

/* One rank's gradient: a small integer. */
static int gradient(const gtp_case *c, int rank, int step, int micro, int consume, int layer, int expert, int64_t i) {
    uint64_t key = (uint64_t)i;
    if (c->zero_rank == rank + 1) return 0;
    key = key * 16 + (uint64_t)rank;
    key = key * 16 + (uint64_t)step;
    key = key * 8 + (uint64_t)micro;
    key = key * 8 + (uint64_t)consume;
    key = key * 16 + (uint64_t)layer;
    key = key * 8 + (uint64_t)expert;
    return (int)(mix(key) % 5) - 2;
}

static int64_t *reference(const run *r, int version, int layer, int expert) {
    const gtp_case *c = r->c;
    return r->reference + ((((int64_t)version * c->layers + layer) * c->experts + expert) * 4 * c->rows) * c->cols;
}

static int64_t whole_gradient(const gtp_case *c, int step, int layer, int expert, int64_t i) {
    int64_t sum = 0;
    for (int r = 0; r < c->ranks; r++)
        for (int m = 0; m < c->micro; m++)
            for (int k = 0; k < consumes(c); k++) sum += gradient(c, r, step, m, k, layer, expert, i);
    return sum;
}
static int64_t next_weight(int64_t w, int64_t g) { return ((w + g) % 13 + 13) % 13 - 6; }

static void wrong(run *r, const char *what, int rank, int layer, int expert, int64_t i, double got, double want) {
    if (atomic_fetch_add(&r->wrong, 1) == 0)
        snprintf(r->first_wrong, sizeof r->first_wrong, "rank %d layer %d expert %d element %lld: %s is %g, not %g",
                 rank, layer, expert, (long long)i, what, got, want);
}

/* ----------------------------------------------------------------------------------------- Work on the streams --- */

typedef struct work_argument {
    run *run;
    rank *rank;
    op op;
    gmm_mat mat;
    int version;
} work_argument;

static char *matrix(const gmm_mat *m, int i) {
    return m->table ? (char *)m->table[i]
                    : (char *)m->data + (size_t)i * (size_t)m->group_stride * (size_t)gmm_dtype_bits(m->dtype) / 8;
}

static gmm_status use_run(const void *argument, gmm_stream stream) {
    const work_argument *a = (const work_argument *)argument;
    const gtp_case *c = a->run->c;
    const gmm_shard_plan *p = &a->rank->plan[a->op.layer];
    (void)stream;
    for (int e = 0; e < c->experts; e++) {
        const uint16_t *w = (const uint16_t *)(const void *)matrix(&a->mat, e);
        const int64_t *want = reference(a->run, a->version, a->op.layer, e);
        for (int64_t i = 0; i < p->padded_rows * c->cols; i++) {
            const double wanted = i < p->local_rows * c->cols ? (double)want[i] : 0;
            if ((double)gmm_bf16_to_f32(w[i]) != wanted)
                wrong(a->run, "the gathered weight", a->rank->index, a->op.layer, e, i, gmm_bf16_to_f32(w[i]), wanted);
        }
    }
    return GMM_OK;
}

static gmm_status write_run(const void *argument, gmm_stream stream) {
    const work_argument *a = (const work_argument *)argument;
    const gtp_case *c = a->run->c;
    const int64_t n = (int64_t)rows_of(c, a->op.layer) * c->cols;
    (void)stream;
    for (int e = 0; e < c->experts; e++) {
        void *to = matrix(&a->mat, e);
        for (int64_t i = 0; i < n; i++)
            gmm_store(a->mat.dtype, to, i, (float)gradient(c, a->rank->index, a->op.step, a->op.micro, a->op.consume,
                                                           a->op.layer, e, i));
    }
    return GMM_OK;
}

/* Optimizer: checks main_grad, and computes new shards from it. */
static gmm_status optimize_run(const void *argument, gmm_stream stream) {
    const work_argument *a = (const work_argument *)argument;
    const gtp_case *c = a->run->c;
    rank *r = a->rank;
    (void)stream;
    for (int l = 0; l < c->layers; l++)
        for (int e = 0; e < c->experts; e++) {
            const gmm_shard_plan *p = &r->plan[l];
            const int64_t first = p->row0 * c->cols, n = p->shard_rows * c->cols, valid = p->valid_rows * c->cols;
            if (c->frozen >> l & 1) continue;
            for (int64_t i = 0; i < n; i++) {
                const double g = gmm_load(c->main_grad ? c->main_grad : GMM_F32, r->grad[l][e], i);
                const double want = i < valid ? (double)whole_gradient(c, a->op.step, l, e, first + i) : 0;
                if (g != want) wrong(a->run, "main_grad", r->index, l, e, first + i, g, want);
                if (i < valid)
                    r->shard[l][e][i] = gmm_f32_to_bf16((float)next_weight((int64_t)gmm_bf16_to_f32(r->shard[l][e][i]),
                                                                           fabs(g) < 1e6 ? (int64_t)g : 0));
            }
        }
    return GMM_OK;
}

static gmm_status enqueue(rank *r, const char *name, gmm_status (*function)(const void *, gmm_stream), const op *o,
                          const gmm_mat *mat, const gmm_range *ranges, int count, gmm_stream stream) {
    work_argument a;
    gmm_work w = GMM_ZERO;
    memset(&a, 0, sizeof a);
    a.run = r->run;
    a.rank = r;
    a.op = *o;
    if (mat) a.mat = *mat;
    a.version = r->version;
    if (o->kind == USE && r->run->c->frozen >> o->layer & 1) a.version = 0;
    w.name = name;
    w.function = function;
    w.argument = &a;
    w.argument_bytes = sizeof a;
    w.ranges = ranges;
    w.range_count = count;
    return r->rt.run(r->rt.self, &w, stream);
}

/* Ranges of a bundle's matrices, `rows` of each. */
static int ranges_of(const rank *r, const gmm_mat *m, int64_t rows, int writes, gmm_range *ranges) {
    const gtp_case *c = r->run->c;
    for (int e = 0; e < c->experts; e++) {
        memset(&ranges[e], 0, sizeof ranges[e]);
        ranges[e].data = matrix(m, e);
        ranges[e].bytes = (size_t)(rows * c->cols * gmm_dtype_bits(m->dtype) / 8);
        ranges[e].writes = writes;
    }
    return c->experts;
}

/* ------------------------------------------------------------------------------------------ The rank's program --- */

static gmm_status publish(rank *r, int layer, gmm_stream stream) {
    r->due[layer] = 0;
    return gmm_gtp_publish(r->gtp, r->weight[layer], r->run->c->experts, stream);
}

/* on_need callback: publishes shards that the optimizer has changed, where the case leaves that to the callback. */
static void on_need(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count) {
    rank *r = (rank *)user;
    (void)gtp;
    r->asked += count;
    for (int l = 0; l < r->run->c->layers; l++)
        if (r->weight[l][0] == weights[0] && r->due[l]) (void)publish(r, l, r->compute[0]);
}

/* The main_grads of a layer as read on the callback's stream: they include everything up to this submit. */
static gmm_status snapshot_run(const void *argument, gmm_stream stream) {
    const work_argument *a = (const work_argument *)argument;
    const gtp_case *c = a->run->c;
    const gmm_shard_plan *p = &a->rank->plan[a->op.layer];
    (void)stream;
    for (int e = 0; e < c->experts; e++)
        for (int64_t i = 0; i < p->valid_rows * c->cols; i++) {
            const double got = gmm_load(c->main_grad ? c->main_grad : GMM_F32, a->rank->grad[a->op.layer][e], i);
            int64_t want = 0;
            for (int r = 0; r < c->ranks; r++)
                for (int m = 0; m <= a->op.micro; m++)
                    for (int k = 0; k <= (m < a->op.micro ? consumes(c) - 1 : a->op.consume); k++)
                        want += gradient(c, r, a->op.step, m, k, a->op.layer, e, p->row0 * c->cols + i);
            if (got != (double)want)
                wrong(a->run, "main_grad at the callback", a->rank->index, a->op.layer, e, i, got, (double)want);
        }
    return GMM_OK;
}
static void on_ready(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream) {
    rank *r = (rank *)user;
    const gtp_case *c = r->run->c;
    const op *o = &r->run->program[r->at];
    gmm_range ranges[CASE_EXPERTS];
    (void)gtp;
    r->reported += count;
    if (count != c->experts || weights[0] != r->weight[o->layer][0])
        wrong(r->run, "the callback", r->index, 0, 0, 0, 0, 0);
    for (int e = 0; e < c->experts; e++) {
        memset(&ranges[e], 0, sizeof ranges[e]);
        ranges[e].data = r->grad[o->layer][e];
        ranges[e].bytes = (size_t)(r->plan[o->layer].shard_rows * c->cols) * main_grad_bytes(c);
    }
    (void)enqueue(r, "snapshot", snapshot_run, o, NULL, ranges, c->experts, stream);
}

/* Views and gradient buffers keep their addresses for the whole run. */
static void check_address(rank *r, const void **first, const gmm_mat *m, int layer) {
    const void *now = m->table ? m->table[0] : m->data;
    if (*first && *first != now) wrong(r->run, "an address", r->index, layer, 0, 0, 0, 0);
    *first = now;
}

static gmm_status execute(rank *r, const op *o) {
    const gtp_case *c = r->run->c;
    const int32_t b = r->bundle[o->layer];
    const gmm_gtp_pass pass = (gmm_gtp_pass)o->pass;
    const int crossing = c->two_streams == 2 ? o->pass : o->pass == GMM_GTP_RECOMPUTE;
    const gmm_stream stream = r->compute[c->two_streams ? (o->layer + crossing) & 1 : 0];
    gmm_range ranges[2 * CASE_LAYERS * CASE_EXPERTS];
    gmm_gtp_gradient g = GMM_ZERO;
    gmm_gtp_view *v = &r->view[o->layer][o->pass < 0 ? 0 : o->pass];
    gmm_mat from = GMM_ZERO;
    gmm_status s = GMM_OK;
    int n = 0;
    switch (o->kind) {
    case ACQUIRE:
        memset(v, 0, sizeof *v);
        s = gmm_gtp_acquire(r->gtp, b, pass, stream, v);
        if (!s) check_address(r, &r->first[o->layer][o->pass], &v->mat, o->layer);
        if (!s && c->ranks > 1 && (char *)matrix(&v->mat, 0) < (char *)r->gather)
            wrong(r->run, "a view outside of the gathered", r->index, o->layer, 0, 0, 0, 0);
        return s;
    case USE:
        n = ranges_of(r, &v->mat, r->plan[o->layer].padded_rows, 0, ranges);
        return enqueue(r, "read weights", use_run, o, &v->mat, ranges, n, stream);
    case RELEASE: return gmm_gtp_release(r->gtp, b, pass, stream);
    case WGRAD:
        if (c->caller_gradients || c->zero_rank == r->index + 1) return GMM_OK;
        memset(&r->wgrad[o->layer], 0, sizeof r->wgrad[o->layer]);
        s = gmm_gtp_wgrad(r->gtp, b, stream, &r->wgrad[o->layer]);
        if (!s) check_address(r, &r->first[o->layer][GMM_GTP_PASSES], &r->wgrad[o->layer].mat, o->layer);
        return s;
    case WRITE:
        if (c->zero_rank == r->index + 1) return GMM_OK;
        if (c->caller_gradients) from = gmm_mat_packed(GMM_BF16, r->caller_gradients[o->layer]);
        if (c->caller_gradients) from.group_stride = (int64_t)rows_of(c, o->layer) * c->cols;
        n = ranges_of(r, c->caller_gradients ? &from : &r->wgrad[o->layer].mat, rows_of(c, o->layer), 1, ranges);
        return enqueue(r, "write gradient", write_run, o, c->caller_gradients ? &from : &r->wgrad[o->layer].mat, ranges,
                       n, stream);
    case SUBMIT:
        g.scale = 1;
        g.add = o->micro == 0 && o->consume == 0 ? GMM_GTP_SET : GMM_GTP_ADD;
        g.zero = c->zero_rank == r->index + 1;
        from = gmm_mat_packed(GMM_BF16, r->caller_gradients[o->layer]);
        if (c->caller_gradients && !g.zero) g.from = &from;
        return gmm_gtp_submit(r->gtp, b, &g, stream);
    case STRAY: return gmm_gtp_prefetch(r->gtp, b, pass);
    case FENCE: return gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute[0]);
    case OPTIMIZE:
        for (int l = 0; l < c->layers; l++)
            for (int e = 0; e < c->experts; e++) {
                gmm_range *a = &ranges[n], *w = &ranges[n + 1];
                const size_t values = (size_t)(r->plan[l].shard_rows * c->cols);
                if (c->frozen >> l & 1) continue;
                memset(a, 0, 2 * sizeof *a);
                a->data = r->grad[l][e];
                a->bytes = values * main_grad_bytes(c);
                w->data = r->shard[l][e];
                w->bytes = values * 2;
                w->writes = 1;
                n += 2;
            }
        s = enqueue(r, "optimizer", optimize_run, o, NULL, ranges, n, r->compute[0]);
        r->version++;
        return s;
    case PUBLISH:
        for (int l = 0; l < c->layers && !s; l++) {
            if (c->frozen >> l & 1) continue;
            if (c->publish_on_need) r->due[l] = 1;
            else s = publish(r, l, r->compute[0]);
        }
        return s;
    default: /* FOLLOW: layer and pass are chain numbers */
        return c->unchained ? GMM_OK
                            : gmm_gtp_follow(r->gtp, r->chain[o->layer], o->pass < 0 ? -1 : r->chain[o->pass]);
    }
}

static void put(run *r, kind kind, int layer, int pass, int step, int micro, int consume) {
    op o;
    o.kind = kind;
    o.layer = layer;
    o.pass = pass;
    o.step = step;
    o.micro = micro;
    o.consume = consume;
    if (r->ops == r->op_capacity) {
        r->op_capacity = 2 * r->op_capacity + 256;
        r->program = (op *)realloc(r->program, (size_t)r->op_capacity * sizeof o);
    }
    r->program[r->ops++] = o;
}

static void write_program(run *r) {
    const gtp_case *c = r->c;
    for (int s = 0; s < c->steps; s++) {
        for (int m = 0; m < c->micro; m++) {
            if (c->wrap) put(r, FOLLOW, GMM_GTP_BACKWARD, m + 1 < c->micro ? GMM_GTP_FORWARD : -1, s, m, 0);
            for (int l = 0; l < c->layers; l++)
                for (int k = 0; k < consumes(c); k++) {
                    put(r, ACQUIRE, l, GMM_GTP_FORWARD, s, m, k);
                    put(r, USE, l, GMM_GTP_FORWARD, s, m, k);
                    put(r, RELEASE, l, GMM_GTP_FORWARD, s, m, k);
                }
            for (int i = c->layers - 1; i >= 0; i--) {
                const int l = c->shuffled ? (i * 3 + s + m) % c->layers : i;
                if (c->recompute >> l & 1) {
                    put(r, ACQUIRE, l, GMM_GTP_RECOMPUTE, s, m, 0);
                    put(r, USE, l, GMM_GTP_RECOMPUTE, s, m, 0);
                    put(r, RELEASE, l, GMM_GTP_RECOMPUTE, s, m, 0);
                }
                for (int k = 0; k < consumes(c); k++) {
                    if (!(c->frozen >> l & 1) || l > 0) { /* a frozen head has no dgrad either */
                        put(r, ACQUIRE, l, GMM_GTP_BACKWARD, s, m, k);
                        put(r, USE, l, GMM_GTP_BACKWARD, s, m, k);
                        put(r, RELEASE, l, GMM_GTP_BACKWARD, s, m, k);
                    }
                    if (c->frozen >> l & 1) continue;
                    put(r, WGRAD, l, 0, s, m, k);
                    put(r, WRITE, l, 0, s, m, k);
                    if (!c->delayed) put(r, SUBMIT, l, 0, s, m, k);
                }
            }
            for (int l = c->layers - 1; l >= 0 && c->delayed; l--)
                if (!(c->frozen >> l & 1)) put(r, SUBMIT, l, 0, s, m, 0);
        }
        if (c->unused_prefetch) put(r, STRAY, c->layers - 1, GMM_GTP_FORWARD, s, 0, 0);
        put(r, FENCE, 0, 0, s, 0, 0);
        put(r, OPTIMIZE, 0, 0, s, 0, 0);
        put(r, PUBLISH, 0, 0, s, 0, 0);
    }
}

/* ---------------------------------------------------------------------------------------- Traced communicators --- */

/* Wrapped communicators: calls of collectives are counted, and the n-th may fail. */
static gmm_status counted(traced_comm *w, gmm_stream stream) {
    rank *r = w->rank;
    gtp_trace_operation(&r->trace, stream);
    return ++r->communications == r->run->c->fail_call && r->index == 0 ? GMM_E_COMM : GMM_OK;
}
static gmm_status c_begin(void *s, const char *what) {
    ((traced_comm *)s)->rank->groups++;
    return ((traced_comm *)s)->inner.group_begin(((traced_comm *)s)->inner.self, what);
}
static gmm_status c_end(void *s) { return ((traced_comm *)s)->inner.group_end(((traced_comm *)s)->inner.self); }
static gmm_status c_gather(void *s, const void *a, void *b, size_t n, gmm_stream t) {
    traced_comm *w = (traced_comm *)s;
    const gmm_status e = counted(w, t);
    return e ? e : w->inner.all_gather(w->inner.self, a, b, n, t);
}
static gmm_status c_scatter(void *s, const void *a, void *b, size_t n, gmm_dtype d, gmm_stream t) {
    traced_comm *w = (traced_comm *)s;
    const gmm_status e = counted(w, t);
    return e ? e : w->inner.reduce_scatter(w->inner.self, a, b, n, d, t);
}
static gmm_status c_exchange(void *s, const void *a, void *b, size_t n, gmm_stream t) {
    traced_comm *w = (traced_comm *)s;
    const gmm_status e = counted(w, t);
    w->rank->exchanges++;
    return e ? e : w->inner.all_to_all(w->inner.self, a, b, n, t);
}
static gmm_status c_max(void *s, float *v, size_t n, gmm_stream t) {
    traced_comm *w = (traced_comm *)s;
    const gmm_status e = counted(w, t);
    return e ? e : w->inner.all_reduce_max(w->inner.self, v, n, t);
}
static gmm_status c_poll(void *s, gmm_error *e) {
    return ((traced_comm *)s)->inner.poll(((traced_comm *)s)->inner.self, e);
}
static void c_give_up(void *s, const char *why) {
    ((traced_comm *)s)->inner.give_up(((traced_comm *)s)->inner.self, why);
}

/* ----------------------------------------------------------------------------------------------------- The run --- */

static gmm_context *context_of(int i) { /* shared by all cases, since creating a context takes longer than a case */
    static gmm_context *made[CASE_RANKS];
    gmm_config config = GMM_ZERO;
    config.threads = 1;
    if (!made[i] && gmm_create(&made[i], &config, NULL) != GMM_OK) abort();
    return made[i];
}

/* Hash of all memory that the rank has bound to the runtime object. */
static uint64_t memory_of(const rank *r) {
    const gtp_case *c = r->run->c;
    const void *block[2 + 3 * CASE_LAYERS * CASE_EXPERTS];
    size_t bytes[2 + 3 * CASE_LAYERS * CASE_EXPERTS];
    uint64_t h = 0;
    int n = 0;
    block[n] = r->gather;
    bytes[n++] = r->gather_bytes;
    block[n] = r->reduce;
    bytes[n++] = r->reduce_bytes;
    for (int l = 0; l < c->layers; l++) {
        const size_t values = (size_t)(r->plan[l].shard_rows * c->cols);
        block[n] = r->caller_gradients[l];
        bytes[n++] = (size_t)(rows_of(c, l) * c->cols * c->experts) * 2;
        for (int e = 0; e < c->experts; e++) {
            block[n] = r->shard[l][e];
            bytes[n++] = values * 2;
            block[n] = r->grad[l][e];
            bytes[n++] = values * main_grad_bytes(c);
        }
    }
    for (int i = 0; i < n; i++)
        for (size_t k = 0; k < bytes[i]; k++) h = (h ^ ((const unsigned char *)block[i])[k]) * 1099511628211u;
    return h;
}

/* Frees the rank's memory. 1: nothing was written beside it. */
static int free_memory(rank *r) {
    int good = 1;
    for (int l = 0; l < r->run->c->layers; l++) {
        good &= gtp_block_free(r->caller_gradients[l]);
        for (int e = 0; e < r->run->c->experts; e++)
            good &= gtp_block_free(r->shard[l][e]) & gtp_block_free(r->grad[l][e]);
    }
    return good & gtp_block_free(r->memory) & gtp_block_free(r->gather) & gtp_block_free(r->reduce);
}

static void fail(rank *r, gmm_status s, const char *text) {
    if (r->status) return;
    r->status = s;
    snprintf(r->text, sizeof r->text, "%s", text);
    if (r->run->c->fail_call || r->run->c->silent_rank) r->last = memory_of(r);
}

static void declare(rank *r) {
    const gtp_case *c = r->run->c;
    gmm_gtp_config config = GMM_ZERO;
    gmm_gtp_domain d = GMM_ZERO;
    gmm_gtp_need need_ = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    int32_t domain = 0;
    size_t bytes = 0;
    gmm_status s;
    config.weights = c->layers * c->experts;
    config.bundles = c->layers;
    config.chains = 3;
    config.timeout_ms = c->timeout_ms;
    config.ctx = r->ctx;
    config.runtime = &r->rt;
    config.hooks.user = r;
    config.hooks.need = on_need;
    config.hooks.ready = on_ready;
    s = gmm_gtp_query(&config, &bytes, &error);
    r->memory = gtp_block(bytes, 0xFF);
    if (!s) s = gmm_gtp_init(r->memory, bytes, &config, &r->gtp, &error);
    if (s) {
        fail(r, s, error.text);
        return;
    }
    d.wire = c->wire;
    d.gather = &r->comm[0];
    d.reduce = &r->comm[1];
    d.gather_stream = r->side[0];
    d.reduce_stream = r->side[1];
    d.reduction = c->reduction;
    d.wgrad_slots = c->wgrad_slots;
    d.synchronous = c->synchronous;
    s = gmm_gtp_add_domain(r->gtp, &d, &domain);
    for (int l = 0; l < c->layers && !s; l++) {
        gmm_shard shard = GMM_ZERO;
        shard.dtype = GMM_BF16;
        shard.rows = rows_of(c, l);
        shard.cols = c->cols;
        shard.gtp_size = c->ranks;
        shard.gtp_rank = r->comm[0].rank;
        shard.unit = 2;
        s = gmm_gtp_plan(&shard, &r->plan[l], NULL);
        for (int n = 0; n < c->experts && !s; n++) {
            const int e = c->other_ids && r->index % 2 ? c->experts - 1 - n : n;
            const gmm_shard_plan *p = &r->plan[l];
            gmm_gtp_weight w = GMM_ZERO;
            r->shard[l][e] = (uint16_t *)gtp_block((size_t)p->shard_data_bytes[0], 0);
            r->grad[l][e] = gtp_block((size_t)(p->shard_rows * c->cols) * main_grad_bytes(c), 0xFF);
            for (int64_t i = 0; i < p->valid_rows * c->cols; i++)
                r->shard[l][e][i] = gmm_f32_to_bf16((float)reference(r->run, 0, l, e)[p->row0 * c->cols + i]);
            w.expert = e;
            w.name = "weight";
            w.shard = &shard;
            w.data[0] = r->shard[l][e];
            w.main_grad = c->frozen >> l & 1 ? NULL : r->grad[l][e];
            w.main_grad_dtype = c->main_grad ? c->main_grad : GMM_F32;
            s = gmm_gtp_add_weight(r->gtp, &w, &r->weight[l][e]);
        }
        if (!s) s = gmm_gtp_add_bundle(r->gtp, domain, r->weight[l], c->experts, "layer", &r->bundle[l]);
        r->caller_gradients[l] = (uint16_t *)gtp_block((size_t)(rows_of(c, l) * c->cols * c->experts) * 2, 0xFF);
    }
    for (int pass = c->unchained ? GMM_GTP_RECOMPUTE : 0; pass < GMM_GTP_PASSES && !s; pass++) {
        gmm_gtp_chain chain = GMM_ZERO;
        int32_t list[CASE_LAYERS];
        for (int i = 0; i < c->layers; i++) {
            const int l = pass == GMM_GTP_FORWARD ? i : c->layers - 1 - i;
            if (pass != GMM_GTP_RECOMPUTE || c->recompute >> l & 1) list[chain.count++] = r->bundle[l];
        }
        chain.pass = (gmm_gtp_pass)pass;
        chain.bundles = list;
        chain.prefetch = c->prefetch;
        chain.together = c->together;
        chain.held = c->held;
        if (chain.count) s = gmm_gtp_add_chain(r->gtp, &chain, &r->chain[pass]);
    }
    if (!s) s = gmm_gtp_seal(r->gtp);
    if (!s) s = gmm_gtp_memory_need(r->gtp, domain, &need_);
    if (!s && !c->unchained) s = gmm_gtp_follow(r->gtp, r->chain[GMM_GTP_FORWARD], r->chain[GMM_GTP_BACKWARD]);
    r->gather_bytes = need_.gather_bytes;
    r->reduce_bytes = need_.reduce_bytes;
    r->gather = gtp_block(need_.gather_bytes, 0xFF);
    r->reduce = gtp_block(need_.reduce_bytes, 0xFF);
    if (!s) s = gmm_gtp_bind(r->gtp, domain, need_.gather_bytes ? r->gather : NULL, need_.gather_bytes, r->reduce,
                             need_.reduce_bytes);
    if (s) fail(r, s, gmm_gtp_last_error(r->gtp));
}

/* Text of the last error. Errors of the caller's own work are in the ranks' runtime. */
static const char *error_text(const rank *r) {
    const char *text = gmm_gtp_last_error(r->gtp);
    return *text ? text : gmm_ranks_error(r->run->ranks, r->index);
}

static void *thread_main(void *argument) {
    rank *r = (rank *)argument;
    const gtp_case *c = r->run->c;
    for (; r->at < r->run->ops && !r->status; r->at++) {
        gmm_status s;
        if (c->silent_rank == r->index + 1 && r->at == r->run->ops / 2) return NULL;
        s = execute(r, &r->run->program[r->at]);
        if (s) fail(r, s, error_text(r));
    }
    return NULL;
}

/* One thread runs all ranks and interleaves their programs in random order. */
static void interleave_ranks(run *r) {
    const gtp_case *c = r->c;
    int left = c->ranks;
    while (left > 0) {
        int i = (int)(mix(r->random += 0x9E3779B97F4A7C15u) % (uint64_t)c->ranks), n;
        rank *k = &r->rank[i];
        if (k->at >= r->ops || k->status) continue;
        for (n = 1 + (int)(mix(r->random + 1) % 8); n > 0 && k->at < r->ops && !k->status; n--, k->at++) {
            gmm_status s;
            if (c->silent_rank == i + 1 && k->at == r->ops / 2) {
                k->at = r->ops;
                break;
            }
            s = execute(k, &r->program[k->at]);
            if (s) fail(k, s, error_text(k));
        }
        left -= k->at >= r->ops || k->status;
    }
}

static uint64_t hash_run(const run *r) {
    const gtp_case *c = r->c;
    uint64_t h = 0;
    for (int l = 0; l < c->layers; l++)
        for (int e = 0; e < c->experts; e++)
            for (int i = 0; i < c->ranks; i++) {
                const rank *k = &r->rank[c->permuted ? (i + 1) % c->ranks : i];
                for (int64_t v = 0; v < k->plan[l].valid_rows * c->cols; v++) {
                    const float g = c->frozen >> l & 1 ? 0
                                  : gmm_load(c->main_grad ? c->main_grad : GMM_F32, k->grad[l][e], v);
                    h = mix(h + k->shard[l][e][v] + ((uint64_t)gmm_f32_bits(g) << 16));
                }
            }
    return h;
}

void gtp_case_run(const gtp_case *c, gtp_result *out) {
    static run r; /* large */
    gmm_ranks_config world = GMM_ZERO;
    int32_t members[CASE_RANKS];
    gmm_comm comms[2][CASE_RANKS];
    pthread_t threads[CASE_RANKS];
    memset(&r, 0, sizeof r);
    memset(out, 0, sizeof *out);
    r.c = c;
    r.random = c->seed;
    r.reference = (int64_t *)calloc((size_t)(c->steps + 1) * (size_t)(c->layers * c->experts * 4 * c->rows * c->cols),
                                    sizeof(int64_t));
    for (int v = 0; v <= c->steps; v++)
        for (int l = 0; l < c->layers; l++)
            for (int e = 0; e < c->experts; e++)
                for (int64_t i = 0; i < (int64_t)rows_of(c, l) * c->cols; i++)
                    reference(&r, v, l, e)[i] =
                        v == 0 ? (int64_t)(mix((uint64_t)(i * 64 + l * 8 + e)) % 13) - 6
                        : c->frozen >> l & 1 ? reference(&r, v - 1, l, e)[i]
                        : next_weight(reference(&r, v - 1, l, e)[i], whole_gradient(c, v - 1, l, e, i));
    write_program(&r);
    world.ranks = c->ranks;
    world.seed = c->seed;
    world.check_races = 1;
    world.timeout_ms = c->timeout_ms;
    if (gmm_ranks_create(&world, &r.ranks, NULL) != GMM_OK) abort();
    for (int i = 0; i < c->ranks; i++) members[i] = c->permuted ? (i + 1) % c->ranks : i;
    if (gmm_ranks_comms(r.ranks, members, c->ranks, comms[0]) || gmm_ranks_comms(r.ranks, members, c->ranks, comms[1]))
        abort();
    for (int i = 0; i < c->ranks; i++) {
        rank *k = &r.rank[i];
        k->run = &r;
        k->index = i;
        k->ctx = context_of(i);
        if (gmm_ranks_runtime(r.ranks, i, &k->trace.inner)) abort();
        k->rt = gtp_traced(&k->trace);
        k->trace.drop = i == 0 ? c->drop_wait : 0;
        for (int j = 0; j < 2; j++) {
            gmm_comm *comm = &k->comm[j];
            k->watch[j].rank = k;
            k->watch[j].inner = *comm = comms[j][c->permuted ? (i + c->ranks - 1) % c->ranks : i];
            comm->exchanges = c->exchanges;
            comm->self = &k->watch[j];
            comm->group_begin = c_begin;
            comm->group_end = c_end;
            comm->all_gather = c_gather;
            comm->reduce_scatter = c_scatter;
            comm->all_to_all = c_exchange;
            comm->all_reduce_max = c_max;
            comm->poll = c_poll;
            comm->give_up = c_give_up;
        }
        for (int j = 0; j < 2; j++) {
            if (!c->threads && k->rt.stream_create(k->rt.self, 0, &k->compute[j])) abort();
            if (k->rt.stream_create(k->rt.self, 0, &k->side[j])) abort();
            k->trace.stream[j] = k->compute[j];
            k->trace.stream[2 + j] = k->side[j];
        }
        declare(k);
    }
    if (c->threads) {
        for (int i = 0; i < c->ranks; i++)
            if (pthread_create(&threads[i], NULL, thread_main, &r.rank[i])) abort();
        for (int i = 0; i < c->ranks; i++) (void)pthread_join(threads[i], NULL);
    } else interleave_ranks(&r);
    out->run = gmm_ranks_run(r.ranks);
    for (int i = 0; i < c->ranks; i++) /* after a failure nothing that was enqueued writes memory */
        if (r.rank[i].last && r.rank[i].last != memory_of(&r.rank[i]))
            wrong(&r, "memory behind an error", i, 0, 0, 0, 0, 0);
    {
        const char *text = "";
        out->races = gmm_ranks_races(r.ranks, &text);
        snprintf(out->race, sizeof out->race, "%s", text);
    }
    out->hash = hash_run(&r);
    for (int i = 0; i < c->ranks; i++) {
        rank *k = &r.rank[i];
        out->status[i] = k->status;
        snprintf(out->text[i], sizeof out->text[i], "%s", k->text);
        if (k->gtp) (void)gmm_gtp_statistics_of(k->gtp, &out->stats[i]);
        if (k->gtp && i == 0) (void)gmm_gtp_memory_need(k->gtp, 0, &out->need);
        (void)gmm_gtp_fini(k->gtp);
        if (!free_memory(k)) wrong(&r, "memory beside a buffer", i, 0, 0, 0, 0, 0);
    }
    out->wrong = atomic_load(&r.wrong);
    snprintf(out->first_wrong, sizeof out->first_wrong, "%s", r.first_wrong);
    out->waits = r.rank[0].trace.waits;
    memcpy(out->implied, r.rank[0].trace.implied, sizeof out->implied);
    out->communications = r.rank[0].communications;
    out->groups = r.rank[0].groups;
    out->exchanges = r.rank[0].exchanges;
    out->asked = r.rank[0].asked;
    out->reported = r.rank[0].reported;
    gmm_ranks_destroy(r.ranks);
    free(r.reference);
    free(r.program);
}

void (gtp_case_check)(const gtp_case *c, gtp_result *out) {
    gtp_case_run(c, out);
    for (int i = 0; i < c->ranks; i++)
        T_CHECK(out->status[i] == GMM_OK, "rank %d: %s: %s", i, gmm_status_name(out->status[i]), out->text[i]);
    T_CHECK(out->run == GMM_OK, "%s", gmm_status_name(out->run));
    T_CHECK(out->races == 0, "%lld races, the first: %s", (long long)out->races, out->race);
    T_CHECK(out->wrong == 0, "%lld wrong values, the first: %s", (long long)out->wrong, out->first_wrong);
    for (int i = 0; i < c->ranks; i++) {
        const gmm_gtp_statistics *s = &out->stats[i];
        T_CHECK(s->calls == out->stats[0].calls, "ranks made other calls");
        T_CHECK(s->acquires == s->prefetched + s->resident + s->exposed, "%lld acquires", (long long)s->acquires);
        T_CHECK(s->gathers == s->prefetches + s->exposed, "%lld gathers", (long long)s->gathers);
    }
}
