/* test_mlp_hooks.c - gmm_grad_hooks.need: the order of its calls, weights that become known in it, what it may not set,
   failures, graphs */
#include "mlp_case.h"

#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"
#endif

enum { G = MLP_GROUPS, HIDDEN = MLP_HIDDEN, FFN = MLP_FFN, ROWS = MLP_ROWS };

/* How weights are given. */
enum given { PACKED, TABLE, TABLE_HOST, CAST, CACHED, QUANTIZED };
static const char *const given_names[] = { "packed", "in a table", "in a table on the host", "cast", "cached",
                                           "quantized" };

typedef struct settings {
    int recipe;           /* -1 = none */
    enum given given;
    gmm_save save;
    gmm_backward_override override;
    int delay;
} settings;

typedef struct hooked {
    mlp_case m;
    settings s;
    gmm_mat real[2], real_columnwise[2]; /* what the hook sets */
    gmm_mat set[2], set_columnwise[2];   /* what d.w1 and d.w2 point to */
    gmm_wgrad_entry entry;
    gmm_wgrad_queue queue;
    gmm_grad_hooks hooks;
    char log[32];         /* calls: need of w1 and w2 for forward x y, for dgrad p q; ready of w1 and w2 1 2 */
    int fail_at;          /* the call of need that fails, from 1; 0 = none */
    void (*spoil)(struct hooked *c, gmm_mat *m); /* changes what the hook sets */
    const void *order[2]; /* eager: memory that is poison before, and written behind a call of `note` */
    char note;
    int early, late;      /* whether order[0] was written and order[1] was not */
} hooked;

/* A matrix without addresses, or with `bad` ones that nothing may read. */
static gmm_mat scrubbed(gmm_mat m, int bad) {
    static void *const bad_table[G] = { (void *)16, (void *)16, (void *)16, (void *)16 };
    m.data = bad && !m.table ? (void *)16 : NULL;
    m.scale = bad && m.scaling && !m.table ? (void *)16 : NULL;
    m.table = bad && m.table ? bad_table : NULL;
    m.scale_table = bad && m.scale_table ? bad_table : NULL;
    m.flags &= ~(uint32_t)GMM_MAT_TABLE_ON_HOST;
    m.group_stride = 0;
    m.columnwise = NULL;
    return m;
}
static void scrub(hooked *c, int i, int bad) {
    c->set[i] = scrubbed(c->real[i], bad);
    c->set_columnwise[i] = scrubbed(c->real_columnwise[i], bad);
    if (c->s.given == QUANTIZED) c->set[i].columnwise = &c->set_columnwise[i];
}

static int written(const void *memory) {
    const unsigned char *bytes = (const unsigned char *)t_get(memory, 64);
    int i = 0;
    while (i < 64 && bytes[i] == 0xFF) i++;
    return i < 64;
}
static void note(hooked *c, char call) {
    const size_t n = strlen(c->log);
    if (n + 1 < sizeof c->log) c->log[n] = call;
    if (call != c->note) return;
    c->early = written(c->order[0]);
    c->late = !written(c->order[1]);
}
static gmm_status need(void *user, gmm_param param, gmm_op op, gmm_stream stream) {
    hooked *c = (hooked *)user;
    const int i = param == GMM_PARAM_W2, dgrad = op == GMM_OP_LINEAR_DGRAD;
    if (stream != T.stream || (param != GMM_PARAM_W1 && !i) || (op != GMM_OP_LINEAR_FWD && !dgrad)) return GMM_E_ARG;
    note(c, dgrad ? "pq"[i] : "xy"[i]);
    if (c->fail_at && !--c->fail_at) return GMM_E_COMM;
    scrub(c, !i, 1);
    scrub(c, i, 1);
    if (c->s.given == QUANTIZED && dgrad && c->s.override == GMM_BACKWARD_BY_RECIPE)
        c->set_columnwise[i] = c->real_columnwise[i];
    else c->set[i] = c->real[i];
    if (c->spoil) c->spoil(c, &c->set[i]);
    return GMM_OK;
}
static void ready(void *user, gmm_param param, gmm_stream stream) {
    note((hooked *)user, stream == T.stream ? "1a2b"[param] : '?');
}

static void build(hooked *c, const settings *s) {
    static const t_form forms[] = { T_PACKED, T_TABLE, T_TABLE_HOST, T_PACKED, T_PACKED, T_PACKED };
    memset(c, 0, sizeof *c);
    c->s = *s;
    t_reseed(7);
    mlp_build(&c->m, s->recipe, s->save, forms[s->given], forms[s->given]);
    mlp_want_gradients(&c->m);
    c->m.config.delay_wgrad = s->delay;
    if (s->recipe >= 0) {
        c->m.quant.random = (const uint64_t *)t_in((const uint64_t[4]){ 1, 2, 3, 4 }, 32);
        c->m.quant.backward_override = s->override;
    }
    for (int i = 0; i < 2; i++) {
        const gmm_mat *const w = i ? &c->m.w2.mat : &c->m.w1.mat;
        gmm_mat copy[2] = { *w };
        if (s->given == QUANTIZED) (void)mlp_cast(&c->m.d, i ? GMM_SLOT_W2 : GMM_SLOT_W1, w, copy);
        copy[0].columnwise = NULL; /* copy[1] is gone when this returns */
        c->set[i] = c->real[i] = copy[0];
        c->set_columnwise[i] = c->real_columnwise[i] = copy[1];
        if (s->given == QUANTIZED) c->set[i].columnwise = &c->set_columnwise[i];
    }
    c->m.d.w1 = &c->set[0];
    c->m.d.w2 = &c->set[1];
    c->queue = gmm_wgrad_queue_over(&c->entry, 1);
    c->m.d.queue = &c->queue;
    c->hooks.user = c;
    c->hooks.ready = ready;
}
#define build(...) T_CALL(build, __VA_ARGS__)

/* From now on weights become known in the hook. */
static void hook(hooked *c) {
    for (int i = 0; i < 2; i++) scrub(c, i, 0);
    c->hooks.need = need;
    c->m.d.hooks = &c->hooks;
}

/* A call with buffers of exactly the queried sizes. */
static gmm_status run(hooked *c, gmm_op op) {
    gmm_mlp *const d = &c->m.d;
    gmm_info info = GMM_ZERO;
    const gmm_status s = gmm_mlp_query(T.ctx, op, d, &info);
    if (s != GMM_OK) return s;
    if (op == GMM_OP_MLP_FWD) {
        d->saved = info.saved_bytes ? t_alloc_aligned(info.saved_bytes, 256) : NULL;
        d->saved_bytes = info.saved_bytes;
        if (c->s.given == CACHED) {
            c->m.quant.weight_cache = t_alloc_aligned(info.weight_cache_bytes, 256);
            c->m.quant.weight_cache_bytes = info.weight_cache_bytes;
        }
    } else if (op == GMM_OP_MLP_BWD) {
        d->deferred = info.deferred_bytes ? t_workspace(info.deferred_bytes) : NULL;
        d->deferred_bytes = info.deferred_bytes;
    }
    return mlp_call(op, d);
}

static void log_is(hooked *c, const char *want) {
    T_CHECK(!strcmp(c->log, want), "calls \"%s\", want \"%s\"", c->log, want);
    memset(c->log, 0, sizeof c->log);
}
#define log_is(...) T_CALL(log_is, __VA_ARGS__)

/* The calls of a backward: products that multiply a copy which was cast before read no matrix. */
static const char *backward_calls(const settings *s, char *text) {
    const int again = s->save == GMM_SAVE_NOTHING, high = s->override == GMM_BACKWARD_HIGH_PRECISION;
    const int casts = s->given == CAST || s->given == CACHED;
    *text = 0;
    if (again && s->given != CACHED) strcat(text, "x");
    if (s->given != CACHED || high) strcat(text, "q");
    if (!s->delay) strcat(text, "21");
    if (!casts || high || (s->given == CAST && !again)) strcat(text, "p");
    return text;
}

/* Weights that become known in the hook give the bits of weights that are known, and are read no more behind their
   product. `only`: a subset of gradients. */
static void same_as_known(const settings *s) {
    char calls[16];
    mlp_results known, late;
    hooked c;
    t_about("recipe %d, weights %s, save %d, override %d", s->recipe, given_names[s->given], (int)s->save,
            (int)s->override);
    build(&c, s);
    T_OK(run(&c, GMM_OP_MLP_FWD));
    T_OK(run(&c, GMM_OP_MLP_BWD));
    if (s->delay) T_OK(run(&c, GMM_OP_MLP_WGRAD));
    known = mlp_results_of(&c.m);
    build(&c, s);
    hook(&c);
    T_OK(run(&c, GMM_OP_MLP_FWD));
    log_is(&c, "xy");
    for (int i = 0; i < 2; i++) scrub(&c, i, 0);
    T_OK(run(&c, GMM_OP_MLP_BWD));
    log_is(&c, backward_calls(s, calls));
    if (s->delay) {
        T_OK(run(&c, GMM_OP_MLP_WGRAD));
        log_is(&c, "21");
    }
    late = mlp_results_of(&c.m);
    mlp_same_results(&known, &late);
}
#define same_as_known(...) T_CALL(same_as_known, __VA_ARGS__)

/* Argument: recipe + REF_RECIPES * given. */
static void recipes(int arg) {
    settings s = { .recipe = arg % REF_RECIPES, .given = (enum given)(arg / REF_RECIPES) };
    for (int i = 0; i < 6; i++) {
        s.save = i % 2 ? GMM_SAVE_NOTHING : GMM_SAVE_PREACT;
        s.override = (gmm_backward_override)(i / 2);
        if (s.given == QUANTIZED && s.override == GMM_BACKWARD_HIGH_PRECISION) continue; /* it multiplies none */
        s.delay = i % 2;
        same_as_known(&s);
    }
}
static void floats(int arg) {
    settings s = { .recipe = -1, .given = (enum given)arg };
    for (int save = GMM_SAVE_PREACT; save <= GMM_SAVE_NOTHING; save++)
        for (s.delay = 0; s.delay < 2; s.delay++) {
            s.save = (gmm_save)save;
            same_as_known(&s);
        }
}

/* Inference; gradients that need no product with weights, or one alone. */
static void subsets(int arg) {
    const settings s = { .recipe = -1 };
    hooked c;
    (void)arg;
    build(&c, &s);
    T_OK(run(&c, GMM_OP_MLP_FWD));
    hook(&c);
    c.m.d.saved = NULL;
    T_OK(mlp_call(GMM_OP_MLP_FWD, &c.m.d));
    log_is(&c, "xy");
    for (int i = 0; i < 2; i++) scrub(&c, i, 0);
    T_OK(run(&c, GMM_OP_MLP_FWD));
    log_is(&c, "xy");
    c.m.d.dx = NULL;
    T_OK(run(&c, GMM_OP_MLP_BWD));
    log_is(&c, "q21");
    c.m.d.w1 = NULL;
    T_OK(run(&c, GMM_OP_MLP_BWD));
    log_is(&c, "q21");
    c.m.d.dw1 = NULL;
    c.m.d.dprob = NULL;
    T_OK(run(&c, GMM_OP_MLP_BWD));
    log_is(&c, "2");
    T_OK(gmm_mlp_fire_hooks(T.ctx, GMM_OP_MLP_BWD, &c.m.d, T.stream));
    log_is(&c, "2");
}

/* FC2's weight is asked for when FC1 has run, FC1's when FC2's gradient is complete; that is reported when FC1's
   backward has not run. */
static void order(int arg) {
    const settings s = { .recipe = -1 };
    hooked c;
    gmm_info info = GMM_ZERO;
    (void)arg;
    build(&c, &s);
    hook(&c);
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.m.d, &info));
    c.m.d.saved = t_alloc_aligned(info.saved_bytes, 256);
    c.m.d.saved_bytes = info.saved_bytes;
    c.note = 'x';
    c.order[0] = c.order[1] = c.m.d.saved;
    T_OK(mlp_call(GMM_OP_MLP_FWD, &c.m.d));
    T_CHECK(!c.early && c.late, "FC1 ran before its weight was asked for");
    t_poison(c.m.d.saved, 0xFF, info.saved_bytes);
    for (int i = 0; i < 2; i++) scrub(&c, i, 0);
    c.note = 'y';
    c.order[1] = c.m.y.data;
    t_poison(c.m.y.data, 0xFF, ROWS * HIDDEN * 2);
    T_OK(mlp_call(GMM_OP_MLP_FWD, &c.m.d));
    T_CHECK(c.early && c.late, "FC2's weight: FC1 has run %d, FC2 has not %d", c.early, c.late);
    for (int i = 0; i < 2; i++) scrub(&c, i, 0);
    c.note = '2';
    c.order[0] = c.m.dw2.data;
    c.order[1] = c.m.dw1.data;
    T_OK(run(&c, GMM_OP_MLP_BWD));
    T_CHECK(c.early && c.late, "ready of w2: its gradient is there %d, that of w1 is not %d", c.early, c.late);
    for (int i = 0; i < 2; i++) scrub(&c, i, 0);
    t_poison(c.m.dx.data, 0xFF, ROWS * HIDDEN * 2);
    c.note = 'p';
    c.order[1] = c.m.dx.data;
    T_OK(run(&c, GMM_OP_MLP_BWD));
    T_CHECK(c.early && c.late, "FC1's weight: dw2 is there %d, dx is not %d", c.early, c.late);
}

static void message_has(gmm_status want, gmm_status got, const char *first, const char *second) {
    const char *text = gmm_last_error(T.ctx);
    t_check_guards();
    T_CHECK(got == want, "%s instead of %s: %s", gmm_status_name(got), gmm_status_name(want), text);
    T_CHECK(strstr(text, first) && strstr(text, second), "\"%s\" lacks \"%s\" or \"%s\"", text, first, second);
}
#define message_has(...) T_CALL(message_has, __VA_ARGS__)

/* A status of the hook ends the call; what comes behind is not called, and nothing is queued. */
static void failures(int arg) {
    static const struct { gmm_op op; int at; const char *log, *text; } rows[] = {
        { GMM_OP_MLP_FWD, 1, "x", "w1 of linear_fwd" }, { GMM_OP_MLP_FWD, 2, "xy", "w2 of linear_fwd" },
        { GMM_OP_MLP_BWD, 1, "q", "w2 of linear_dgrad" }, { GMM_OP_MLP_BWD, 2, "q21p", "w1 of linear_dgrad" },
    };
    settings s = { .recipe = -1 };
    for (s.delay = 0; s.delay < 2; s.delay++)
        for (int i = 0; i < T_COUNT(rows); i++) {
            hooked c;
            build(&c, &s);
            hook(&c);
            if (rows[i].op == GMM_OP_MLP_BWD) T_OK(run(&c, GMM_OP_MLP_FWD));
            memset(c.log, 0, sizeof c.log);
            c.fail_at = rows[i].at;
            message_has(GMM_E_COMM, run(&c, rows[i].op), "mlp.hooks.need", rows[i].text);
            log_is(&c, s.delay && rows[i].at == 2 && rows[i].op == GMM_OP_MLP_BWD ? "qp" : rows[i].log);
            T_CHECK(c.queue.count == 0, "%d entries", (int)c.queue.count);
            (void)arg;
        }
}

static void other_dtype(hooked *c, gmm_mat *m) { (void)c; m->dtype = GMM_F16; }
static void other_ld(hooked *c, gmm_mat *m) { (void)c; m->ld = 256; m->group_stride = 256 * 192; }
static void other_scaling(hooked *c, gmm_mat *m) { (void)c; m->scaling = GMM_SCALING_TENSOR; }
static void no_address(hooked *c, gmm_mat *m) { (void)c; m->data = NULL; }
static void unaligned(hooked *c, gmm_mat *m) { (void)c; m->data = (char *)m->data + 2; }
static void odd_stride(hooked *c, gmm_mat *m) { (void)c; m->group_stride = 2 * FFN * HIDDEN + 1; }
static void over_output(hooked *c, gmm_mat *m) { m->data = c->m.y.data; }
static void over_saved(hooked *c, gmm_mat *m) { m->data = c->m.d.saved; }

/* What the hook may not set is refused before the product. */
static void refusals(int arg) {
    static const struct { void (*spoil)(hooked *, gmm_mat *); gmm_status status; const char *text; } rows[] = {
        { other_dtype, GMM_E_CONFIG, "dtype" }, { other_ld, GMM_E_CONFIG, "ld 256 must be 64" },
        { other_scaling, GMM_E_DTYPE, "scaled tensor" }, { no_address, GMM_E_NULL, "neither data nor table" },
        { unaligned, GMM_E_ALIGN, "16 bytes" }, { odd_stride, GMM_E_ALIGN, "group_stride" },
        { over_output, GMM_E_ARG, "overlaps" }, { over_saved, GMM_E_ARG, "overlaps" },
    }, in_dgrad[] = {
        { other_dtype, GMM_E_CONFIG, "dtype" }, { other_ld, GMM_E_CONFIG, "ld 256 must be 96" },
        { other_scaling, GMM_E_DTYPE, "scaled tensor" }, { unaligned, GMM_E_ALIGN, "16 bytes" },
        { odd_stride, GMM_E_ALIGN, "group_stride" },
    };
    const settings s = { .recipe = -1 };
    gmm_info info = GMM_ZERO;
    hooked c;
    (void)arg;
    for (int i = 0; i < T_COUNT(rows); i++) {
        build(&c, &s);
        hook(&c);
        c.spoil = rows[i].spoil;
        message_has(rows[i].status, run(&c, GMM_OP_MLP_FWD), "mlp.w1", rows[i].text);
        log_is(&c, "x");
    }
    for (int i = 0; i < T_COUNT(in_dgrad); i++) {
        build(&c, &s);
        hook(&c);
        T_OK(run(&c, GMM_OP_MLP_FWD));
        memset(c.log, 0, sizeof c.log);
        c.spoil = in_dgrad[i].spoil;
        message_has(in_dgrad[i].status, run(&c, GMM_OP_MLP_BWD), "mlp.w2", in_dgrad[i].text);
        T_CHECK(!strstr(gmm_last_error(T.ctx), "columnwise"), "of a plain weight: \"%s\"", gmm_last_error(T.ctx));
        log_is(&c, "q");
    }
    build(&c, &s);
    hook(&c);
    c.set[0].dtype = GMM_F16; /* the dtype must be known */
    T_REFUSED(GMM_E_DTYPE, gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.m.d, &info), "mlp.w1", NULL);
    c.m.d.w1 = NULL;
    T_REFUSED(GMM_E_NULL, gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.m.d, &info), "mlp.w1", NULL);
}

/* Of quantized weights the fields of the copy that is read must remain, and it must be given. */
static void no_copy(hooked *c, gmm_mat *m) { (void)c; m->columnwise = NULL; }
static void other_copy_ld(hooked *c, gmm_mat *m) { (void)m; c->set_columnwise[1].ld = 4096; }
static void unaligned_copy(hooked *c, gmm_mat *m) {
    (void)m;
    c->set_columnwise[1].data = (char *)c->set_columnwise[1].data + 1;
}
static void quantized_refusals(int arg) {
    static const struct { void (*spoil)(hooked *, gmm_mat *); gmm_status status; const char *text; } rows[] = {
        { no_copy, GMM_E_NULL, "w2.columnwise" }, { other_copy_ld, GMM_E_CONFIG, "ld 4096" },
        { unaligned_copy, GMM_E_ALIGN, "16 bytes" }, { other_dtype, GMM_E_DTYPE, "quant.recipe" },
    };
    const settings s = { .recipe = arg, .given = QUANTIZED };
    for (int i = 0; i < T_COUNT(rows); i++) {
        hooked c;
        build(&c, &s);
        hook(&c);
        T_OK(run(&c, GMM_OP_MLP_FWD));
        for (int k = 0; k < 2; k++) scrub(&c, k, 0);
        c.spoil = rows[i].spoil;
        memset(c.log, 0, sizeof c.log);
        message_has(rows[i].status, run(&c, GMM_OP_MLP_BWD), "mlp.w2", rows[i].text);
        log_is(&c, "q");
    }
}

#ifdef HAVE_CUDA
/* A capture calls `need`, whose addresses the graph reads, and not `ready`; a replay calls neither. */
static void graph(int arg) {
    const settings s = { .recipe = arg < 0 ? -1 : arg, .given = arg < 0 ? PACKED : QUANTIZED };
    const gmm_op ops[2] = { GMM_OP_MLP_FWD, GMM_OP_MLP_BWD };
    const char *error;
    gmm_status status = GMM_OK;
    void *work[2], *captured = NULL;
    size_t bytes[2];
    mlp_results eager, replay;
    hooked c;
    const t_mat *const results[4] = { &c.m.y, &c.m.dx, &c.m.dw1, &c.m.dw2 };
    build(&c, &s);
    hook(&c);
    T_OK(run(&c, GMM_OP_MLP_FWD)); /* loads the code */
    for (int i = 0; i < 2; i++) scrub(&c, i, 0);
    T_OK(run(&c, GMM_OP_MLP_BWD));
    eager = mlp_results_of(&c.m);
    memset(c.log, 0, sizeof c.log);
    for (int k = 0; k < 2; k++) {
        gmm_info info = GMM_ZERO;
        for (int i = 0; i < 2; i++) scrub(&c, i, 0);
        T_OK(gmm_mlp_query(T.ctx, ops[k], &c.m.d, &info));
        bytes[k] = info.workspace_bytes;
        work[k] = t_workspace(bytes[k]);
    }
    error = device_begin_capture();
    T_CHECK(!error, "%s", error);
    for (int k = 0; k < 2 && !status; k++) {
        for (int i = 0; i < 2; i++) scrub(&c, i, 0);
        status = k ? gmm_mlp_bwd(T.ctx, &c.m.d, work[k], bytes[k], T.stream)
                   : gmm_mlp_fwd(T.ctx, &c.m.d, work[k], bytes[k], T.stream);
    }
    error = device_end_capture(&captured);
    T_CHECK(!error && status == GMM_OK, "%s, %s", error ? error : "", gmm_last_error(T.ctx));
    log_is(&c, "xyqp");
    for (int i = 0; i < 2; i++) scrub(&c, i, 1);
    for (int i = 0; i < 4; i++) t_mat_poison(results[i]);
    error = device_replay(captured);
    T_CHECK(!error, "%s", error);
    t_wait();
    replay = mlp_results_of(&c.m);
    mlp_same_results(&eager, &replay);
    log_is(&c, "");
    device_graph_free(captured);
}
#endif

void tests_mlp_hooks(void) {
    for (int given = PACKED; given <= TABLE_HOST; given++)
        t_add(floats, given, "mlp hooks need, weights %s", given_names[given]);
    for (int given = CAST; given <= QUANTIZED; given++)
        for (int i = 0; i < REF_RECIPES; i++)
            t_add(recipes, i + REF_RECIPES * given, "mlp hooks need, %s, weights %s", ref_recipe_of(i).name,
                  given_names[given]);
    t_add(subsets, 0, "mlp hooks need, inference and subsets of gradients");
    t_add(order, 0, "mlp hooks need and ready, order of products");
    t_add(failures, 0, "mlp hooks need fails");
    t_add(refusals, 0, "mlp hooks need sets what it may not");
    t_add(quantized_refusals, REF_FP8_BLOCK, "mlp hooks need sets a wrong quantized copy");
#ifdef HAVE_CUDA
    t_add_gpu(graph, -1, "mlp hooks need in a graph");
    t_add_gpu(graph, REF_FP8_BLOCK, "mlp hooks need in a graph, quantized weights");
#endif
}
