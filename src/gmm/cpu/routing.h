/* ................................................................................................. 14.7 Routing ... */

/* CPU engine: top-k routing, forward and backward, with its losses; also the heap that sorts candidates. */

static float gmm__row_dot(const float *a, const float *b, int64_t n) {
    float lane[GMM__LANES];
    memset(lane, 0, sizeof lane);
    gmm__lanes_add(lane, a, b, n);
    return gmm__lanes_sum(lane);
}
static float gmm__row_sum(const float *a, int64_t n) { return gmm__row_dot(a, NULL, n); }

/* Natural logarithm of a normal positive number, within 2 ulp, without libm: x = 2^e (1 + f) with 1 + f between
   sqrt(1/2) and sqrt(2), and log(1 + f) = 2 atanh(f / (2 + f)). */
GMM__HD float gmm__ln(float x) {
    const uint32_t bits = gmm_f32_bits(x);
    const int32_t e = (int32_t)((bits - 0x3F3504F3u) >> 23), exponent = e > 255 ? e - 512 : e;
    const float f = gmm_f32_from_bits(bits - ((uint32_t)exponent << 23)) - 1.0f;
    const float s = f / (2.0f + f), z = s * s;
    const float series = z * (0.333333333f + z * (0.2f + z * (0.142857143f + z * 0.111111111f)));
    if (!(x < 3.4e38f)) return x; /* infinity, NaN */
    return (float)exponent * 0.693359375f + (2.0f * (s + s * series) - (float)exponent * 2.12194440e-4f);
}

/* Softmax of a row into s; returns its logsumexp. */
static float gmm__softmax(const float *logits, float *s, int64_t n) {
    float largest = logits[0], sum;
    int64_t i;
    for (i = 1; i < n; i++) largest = logits[i] > largest || largest != largest ? logits[i] : largest;
    for (i = 0; i < n; i++) s[i] = gmm_exp(logits[i] - largest);
    sum = gmm__row_sum(s, n);
    for (i = 0; i < n; i++) s[i] /= sum;
    return largest + gmm__ln(sum);
}

/* A candidate as an integer that is larger for a better candidate: the value in the high half (NaN is the lowest),
   ~expert in the low half, so that of equal values the lower index is better. */
static uint64_t gmm__candidate(float value, int64_t expert) {
    const uint32_t u = gmm_f32_bits(value);
    const uint32_t order = value != value ? 0u : u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)order << 32 | (uint64_t)~(uint32_t)expert;
}
static int32_t gmm__candidate_expert(uint64_t candidate) { return (int32_t)~(uint32_t)candidate; }

/* Restores a min-heap after element i was increased. */
static void gmm__heap_sift_down(uint64_t *heap, int64_t count, int64_t i) {
    const uint64_t key = heap[i];
    int64_t child;
    while ((child = 2 * i + 1) < count) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= key) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

/* Sorts a min-heap into descending order. */
static void gmm__heap_sort(uint64_t *heap, int64_t count) {
    int64_t i;
    for (i = count - 1; i > 0; i--) {
        const uint64_t least = heap[0];
        heap[0] = heap[i];
        heap[i] = least;
        gmm__heap_sift_down(heap, i, 0);
    }
}

/* The k candidates with the largest score + bias, in descending order. */
static void gmm__topk_choose(const float *score, const float *bias, int64_t experts, uint64_t *best, int64_t k) {
    int64_t e, i;
    for (e = 0; e < k; e++) best[e] = gmm__candidate(score[e] + (bias ? bias[e] : 0.0f), e);
    for (i = k / 2; i-- > 0;) gmm__heap_sift_down(best, k, i);
    for (; e < experts; e++) {
        const uint64_t candidate = gmm__candidate(score[e] + (bias ? bias[e] : 0.0f), e);
        if (candidate <= best[0]) continue;
        best[0] = candidate;
        gmm__heap_sift_down(best, k, 0);
    }
    gmm__heap_sort(best, k);
}

/* Tokens are divided into chunks by T alone. Each chunk has its own counts and sums, which are added in the order of
   the chunks, so that losses do not depend on the number of threads. */
static int64_t gmm__topk_chunk(int64_t tokens) {
    const int64_t chunk = gmm__ceil_div(tokens, 256);
    return chunk < 16 ? 16 : chunk;
}

enum { GMM__TOPK_SCRATCH, GMM__TOPK_COUNTS, GMM__TOPK_SUMS, GMM__TOPK_Z }; /* regions of the workspace */

/* The buffers of one thread, each for one token. softmax is score itself where that is a softmax. */
typedef struct gmm__topk_rows {
    float *logits, *score, *softmax, *weight;
    uint64_t *best;
} gmm__topk_rows;

/* An exponential takes about as long as four copies. */
static double gmm__topk_work(const gmm_route *r) { return 4.0 * (double)r->tokens * (double)r->experts; }
static size_t gmm__topk_row_bytes(const gmm_route *r) { return (size_t)gmm__round_up(r->experts, 16) * sizeof(float); }
static size_t gmm__topk_thread_bytes(const gmm_route *r) {
    return 4 * gmm__topk_row_bytes(r) + (size_t)gmm__round_up(r->topk, 8) * sizeof(uint64_t);
}

/* Bytes of the buffers of all threads of a call. */
static size_t gmm__topk_scratch(const gmm__call *call) {
    const gmm_route *r = &call->d.route;
    const int64_t chunks = gmm__ceil_div(r->tokens, gmm__topk_chunk(r->tokens));
    return (size_t)gmm__cpu_threads(call->ctx, chunks, gmm__topk_work(r)) * gmm__topk_thread_bytes(r);
}

/* Computes the scores of token t. Returns their logsumexp where a softmax is computed, else 0. */
static float gmm__topk_scores(const gmm__plan *plan, int64_t t, int32_t thread, gmm__topk_rows *rows) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    const gmm_mat *m = &call->mat[GMM__X_];
    const int64_t n = gmm__round_up(r->experts, 16);
    float lse = 0.0f;
    int64_t e;
    rows->logits = (float *)(void *)((char *)gmm__part(plan, GMM__TOPK_SCRATCH) +
                                     (size_t)thread * gmm__topk_thread_bytes(r));
    rows->score = rows->logits + n;
    rows->softmax = r->score == GMM_SCORE_SOFTMAX ? rows->score : rows->logits + 2 * n;
    rows->weight = rows->logits + 3 * n;
    rows->best = (uint64_t *)(void *)(rows->logits + 4 * n);
    gmm__row_load(m->dtype, gmm__at(m, 0, t, 0), rows->logits, r->experts);
    if (r->score == GMM_SCORE_SOFTMAX || r->z_coeff != 0.0f)
        lse = gmm__softmax(rows->logits, rows->softmax, r->experts);
    if (r->score == GMM_SCORE_SIGMOID)
        for (e = 0; e < r->experts; e++) rows->score[e] = gmm_sigmoid(rows->logits[e]);
    return lse;
}

/* Divisor of the chosen scores, whose sum is `chosen`. */
static float gmm__topk_divisor(const gmm_route *r, float chosen) {
    return !r->normalize ? 1.0f : r->score == GMM_SCORE_SIGMOID ? chosen + 1e-20f : chosen;
}
/* part / sum; 0 where the sum of all scores underflows to 0. */
static float gmm__quotient(float part, float sum) { return sum == 0.0f ? 0.0f : part / sum; }

static void gmm__topk_fwd_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const int64_t chunk = gmm__topk_chunk(r->tokens), begin = c * chunk;
    const int64_t end = begin + chunk < r->tokens ? begin + chunk : r->tokens;
    int32_t *counts = (int32_t *)gmm__part(plan, GMM__TOPK_COUNTS) + c * r->experts;
    float *score_sums = r->aux_coeff != 0.0f ? (float *)gmm__part(plan, GMM__TOPK_SUMS) + c * r->experts : NULL;
    float z = 0.0f;
    int64_t t, e;
    int32_t i;
    memset(counts, 0, (size_t)r->experts * sizeof *counts);
    if (score_sums) memset(score_sums, 0, (size_t)r->experts * sizeof *score_sums);
    for (t = begin; t < end; t++) {
        gmm__topk_rows rows;
        const float lse = gmm__topk_scores(plan, t, thread, &rows);
        float *probs = r->probs + t * r->topk, chosen = 0.0f, divisor;
        int32_t *indices = r->indices + t * r->topk;
        gmm__topk_choose(rows.score, r->expert_bias, r->experts, rows.best, r->topk);
        for (i = 0; i < r->topk; i++) {
            indices[i] = gmm__candidate_expert(rows.best[i]);
            probs[i] = rows.score[indices[i]];
            chosen += probs[i];
            counts[indices[i]]++;
        }
        divisor = gmm__topk_divisor(r, chosen);
        for (i = 0; i < r->topk; i++) probs[i] = r->scale * gmm__quotient(probs[i], divisor);
        if (score_sums) {
            const float all = r->score == GMM_SCORE_SIGMOID ? gmm__row_sum(rows.score, r->experts) : 1.0f;
            for (e = 0; e < r->experts; e++) score_sums[e] += gmm__quotient(rows.score[e], all);
        }
        z += lse * lse;
    }
    ((float *)gmm__part(plan, GMM__TOPK_Z))[c] = z;
}

static int gmm__cpu_plan_topk_fwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    const size_t chunks = (size_t)gmm__ceil_div(r->tokens, gmm__topk_chunk(r->tokens));
    gmm__reserve(plan, GMM__TOPK_SCRATCH, gmm__topk_scratch(call));
    gmm__reserve(plan, GMM__TOPK_COUNTS, chunks * (size_t)r->experts * sizeof(int32_t));
    gmm__reserve(plan, GMM__TOPK_SUMS, r->aux_coeff != 0.0f ? chunks * (size_t)r->experts * sizeof(float) : 0);
    gmm__reserve(plan, GMM__TOPK_Z, chunks * sizeof(float));
    return 1;
}

static gmm_status gmm__cpu_launch_topk_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_route *r = &plan->call->d.route;
    const int64_t experts = r->experts, chunks = gmm__ceil_div(r->tokens, gmm__topk_chunk(r->tokens));
    const int32_t *counts = (const int32_t *)gmm__part(plan, GMM__TOPK_COUNTS);
    const float *score_sums = (const float *)gmm__part(plan, GMM__TOPK_SUMS);
    const double tokens = (double)r->tokens;
    double aux = 0.0, z = 0.0;
    int64_t c, e;
    int32_t first = 0;
    (void)stream;
    gmm__cpu_for(plan->call->ctx, chunks, gmm__topk_work(r), gmm__topk_fwd_chunk, plan);
    for (e = 0; e < experts; e++) {
        int32_t count = 0;
        double sum = 0.0;
        for (c = 0; c < chunks; c++) {
            count += counts[c * experts + e];
            if (r->aux_coeff != 0.0f) sum += score_sums[c * experts + e];
        }
        aux += count * sum;
        if (r->counts) r->counts[e] = count;
        if (r->offsets) r->offsets[e] = first;
        first += count;
    }
    if (r->offsets) r->offsets[experts] = first;
    for (c = 0; c < chunks; c++) z += ((const float *)gmm__part(plan, GMM__TOPK_Z))[c];
    if (r->aux_loss)
        *r->aux_loss = r->tokens ? (float)(r->aux_coeff * (double)experts / (r->topk * tokens * tokens) * aux) : 0.0f;
    if (r->z_loss) *r->z_loss = r->tokens ? (float)(r->z_coeff / tokens * z) : 0.0f;
    return GMM_OK;
}

/* Computes w[e] = score[e] * (gradient of score[e]) rather than the gradient itself: it contains scores only as
   quotients score / sum, which do not overflow where scores are small. */
static void gmm__topk_bwd_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const gmm_mat *dlogits = &plan->call->mat[GMM__DX];
    const int64_t chunk = gmm__topk_chunk(r->tokens), begin = c * chunk;
    const int64_t end = begin + chunk < r->tokens ? begin + chunk : r->tokens;
    const double tokens = (double)r->tokens;
    const float daux = (float)((double)r->aux_coeff * r->experts / (r->topk * tokens * tokens) *
                               (r->dloss && r->aux_coeff != 0.0f ? r->dloss[0] : 1.0f));
    const float dz = (float)(2.0 * r->z_coeff / tokens * (r->dloss && r->z_coeff != 0.0f ? r->dloss[1] : 1.0f));
    int64_t t, e;
    int32_t i;
    for (t = begin; t < end; t++) {
        gmm__topk_rows rows;
        const float lse = gmm__topk_scores(plan, t, thread, &rows);
        float *w = rows.weight;
        const float *s = rows.score;
        memset(w, 0, (size_t)r->experts * sizeof *w);
        if (r->dprobs) {
            const float *g = r->dprobs + t * r->topk;
            const int32_t *indices = r->indices + t * r->topk;
            float chosen = 0.0f, divisor, mean = 0.0f;
            for (i = 0; i < r->topk; i++)
                if (indices[i] >= 0 && indices[i] < r->experts) chosen += s[indices[i]];
            divisor = gmm__topk_divisor(r, chosen);
            for (i = 0; r->normalize && i < r->topk; i++)
                if (indices[i] >= 0 && indices[i] < r->experts) mean += g[i] * gmm__quotient(s[indices[i]], divisor);
            for (i = 0; i < r->topk; i++)
                if (indices[i] >= 0 && indices[i] < r->experts)
                    w[indices[i]] += r->scale * gmm__quotient(s[indices[i]], divisor) * (g[i] - mean);
        }
        if (r->aux_coeff != 0.0f) {
            float all = 1.0f, mean = 0.0f;
            if (r->score == GMM_SCORE_SIGMOID) {
                all = gmm__row_sum(s, r->experts);
                for (e = 0; e < r->experts; e++) mean += daux * (float)r->counts[e] * gmm__quotient(s[e], all);
            }
            for (e = 0; e < r->experts; e++) w[e] += gmm__quotient(s[e], all) * (daux * (float)r->counts[e] - mean);
        }
        if (r->score == GMM_SCORE_SOFTMAX) {
            const float sum = gmm__row_sum(w, r->experts);
            for (e = 0; e < r->experts; e++) w[e] -= s[e] * sum;
        } else {
            for (e = 0; e < r->experts; e++) {
                float complement; /* 1 - s */
                (void)gmm_sigmoid_rest(rows.logits[e], &complement);
                w[e] *= complement;
            }
        }
        if (r->z_coeff != 0.0f)
            for (e = 0; e < r->experts; e++) w[e] += dz * lse * rows.softmax[e];
        gmm__row_store(dlogits->dtype, gmm__at(dlogits, 0, t, 0), w, r->experts);
    }
}

static int gmm__cpu_plan_topk_bwd(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, GMM__TOPK_SCRATCH, gmm__topk_scratch(call));
    return 1;
}

static gmm_status gmm__cpu_launch_topk_bwd(const gmm__plan *plan, gmm_stream stream) {
    const int64_t tokens = plan->call->d.route.tokens;
    (void)stream;
    gmm__cpu_for(plan->call->ctx, gmm__ceil_div(tokens, gmm__topk_chunk(tokens)),
                 gmm__topk_work(&plan->call->d.route), gmm__topk_bwd_chunk, plan);
    return GMM_OK;
}

