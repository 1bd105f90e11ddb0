/* ................................................................................................. 14.7 Routing ... */

/* CPU engine: top-k routing, forward and backward, with its losses; dense routings; the update of expert biases. */

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

/* The experts [first, last) join the k best candidates so far, of which there are `count`; they are a min-heap once
   there are k. Returns the new count. */
static int64_t gmm__topk_add(const float *value, int64_t first, int64_t last, uint64_t *best, int64_t count,
                             int64_t k) {
    int64_t e, i;
    for (e = first; e < last; e++) {
        const uint64_t candidate = gmm__candidate(value[e], e);
        if (count < k) {
            best[count++] = candidate;
            for (i = k / 2; count == k && i-- > 0;) gmm__heap_sift_down(best, k, i);
        } else if (candidate > best[0]) {
            best[0] = candidate;
            gmm__heap_sift_down(best, k, 0);
        }
    }
    return count;
}

/* The group_topk groups with the largest sums of their group_sum largest values, as candidates in descending order. */
static void gmm__topk_groups(const gmm_route *r, const float *value, uint64_t *best, uint64_t *groups) {
    const int64_t members = r->experts / r->groups;
    float *sums = (float *)(void *)(groups + r->group_topk);
    int64_t g, i;
    for (g = 0; g < r->groups; g++) {
        (void)gmm__topk_add(value, g * members, (g + 1) * members, best, 0, r->group_sum);
        gmm__heap_sort(best, r->group_sum);
        sums[g] = 0.0f;
        for (i = 0; i < r->group_sum; i++) sums[g] += value[gmm__candidate_expert(best[i])];
    }
    (void)gmm__topk_add(sums, 0, r->groups, groups, 0, r->group_topk);
    gmm__heap_sort(groups, r->group_topk);
}

/* The k experts with the largest values, in descending order. */
static void gmm__topk_choose(const gmm_route *r, const float *value, uint64_t *best, uint64_t *groups) {
    const int64_t members = r->groups > 1 ? r->experts / r->groups : r->experts;
    int64_t count = 0, i;
    if (r->groups > 1) gmm__topk_groups(r, value, best, groups);
    for (i = 0; i < (r->groups > 1 ? r->group_topk : 1); i++) {
        const int64_t first = r->groups > 1 ? gmm__candidate_expert(groups[i]) * members : 0;
        count = gmm__topk_add(value, first, first + members, best, count, r->topk);
    }
    gmm__heap_sort(best, r->topk);
}

/* Tokens are divided into chunks by T and the sequences alone; a chunk has tokens of one sequence. Each chunk has its
   own counts and sums, which are added in the order of the chunks, so that losses do not depend on the number of
   threads. */
static int64_t gmm__topk_chunk(int64_t tokens) {
    const int64_t chunk = gmm__ceil_div(tokens, 256);
    return chunk < 16 ? 16 : chunk;
}
typedef struct gmm__topk_range {
    int64_t sequence, begin, end; /* the tokens [begin, end) of a sequence */
} gmm__topk_range;
static int64_t gmm__topk_chunks_per_sequence(const gmm_route *r) {
    return gmm__ceil_div(r->tokens / r->sequences, gmm__topk_chunk(r->tokens));
}
static int64_t gmm__topk_chunks(const gmm_route *r) { return r->sequences * gmm__topk_chunks_per_sequence(r); }
static gmm__topk_range gmm__topk_range_of(const gmm_route *r, int64_t c) {
    const int64_t per_sequence = gmm__topk_chunks_per_sequence(r), chunk = gmm__topk_chunk(r->tokens);
    const int64_t length = r->tokens / r->sequences;
    gmm__topk_range range;
    range.sequence = c / per_sequence;
    range.begin = c % per_sequence * chunk;
    range.end = range.begin + chunk < length ? range.begin + chunk : length;
    return range;
}
/* Token i of a sequence. */
static int64_t gmm__topk_token(const gmm_route *r, int64_t sequence, int64_t i) {
    return r->sequence_first ? i * r->sequences + sequence : sequence * (r->tokens / r->sequences) + i;
}

enum { /* regions of the workspace */
    GMM__TOPK_SCRATCH, GMM__TOPK_COUNTS, GMM__TOPK_SUMS, GMM__TOPK_Z,
    GMM__TOPK_VALID,   /* [sequences + 1] int64: tokens that are no padding, of each sequence and of all */
    GMM__TOPK_MULTIPLIERS, /* [E] float: Sinkhorn's multipliers of experts */
    GMM__TOPK_TOTAL    /* [E] int32: counts */
};

/* The buffers of one thread, each for one token. softmax is score itself where that is a softmax. */
typedef struct gmm__topk_rows {
    float *logits, *score, *softmax, *weight;
    uint64_t *best, *groups;
} gmm__topk_rows;

/* An exponential takes about as long as four copies. */
static double gmm__topk_work(const gmm_route *r) { return 4.0 * (double)r->tokens * (double)r->experts; }
static size_t gmm__topk_row_bytes(const gmm_route *r) { return (size_t)gmm__round_up(r->experts, 16) * sizeof(float); }
/* `best` holds topk or group_sum candidates; behind it are candidates and sums of groups. */
static int64_t gmm__topk_candidates(const gmm_route *r) {
    return gmm__round_up(r->topk > r->group_sum ? r->topk : r->group_sum, 8);
}
static size_t gmm__topk_thread_bytes(const gmm_route *r) {
    const int64_t groups = r->groups > 1 ? gmm__round_up((int64_t)r->group_topk + r->groups, 8) : 0;
    return 4 * gmm__topk_row_bytes(r) + (size_t)(gmm__topk_candidates(r) + groups) * sizeof(uint64_t);
}

/* Bytes of the buffers of all threads of a call. */
static size_t gmm__topk_scratch(const gmm__call *call) {
    const gmm_route *r = &call->d.route;
    return (size_t)gmm__cpu_threads(call->ctx, gmm__topk_chunks(r), gmm__topk_work(r)) * gmm__topk_thread_bytes(r);
}

/* A thread's buffers, with the logits of token t in fp32. */
static void gmm__topk_load(const gmm__plan *plan, int64_t t, int32_t thread, gmm__topk_rows *rows) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    const gmm_mat *m = &call->mat[GMM__X_];
    const int64_t n = gmm__round_up(r->experts, 16);
    int64_t e;
    rows->logits = (float *)(void *)((char *)gmm__region(plan, GMM__TOPK_SCRATCH) +
                                     (size_t)thread * gmm__topk_thread_bytes(r));
    rows->score = rows->logits + n;
    rows->softmax = r->score == GMM_SCORE_SOFTMAX ? rows->score : rows->logits + 2 * n;
    rows->weight = rows->logits + 3 * n;
    rows->best = (uint64_t *)(void *)(rows->logits + 4 * n);
    rows->groups = rows->best + gmm__topk_candidates(r);
    if (m->dtype == GMM_F64)
        for (e = 0; e < r->experts; e++) rows->logits[e] = (float)((const double *)gmm__at(m, 0, t, 0))[e];
    else gmm__row_load(m->dtype, gmm__at(m, 0, t, 0), rows->logits, r->experts);
}

/* Computes the scores of token t. Returns their logsumexp where a softmax is computed, else 0. */
static float gmm__topk_scores(const gmm__plan *plan, int64_t t, int32_t thread, gmm__topk_rows *rows) {
    const gmm_route *r = &plan->call->d.route;
    float lse = 0.0f;
    int64_t e;
    gmm__topk_load(plan, t, thread, rows);
    if (r->score == GMM_SCORE_SOFTMAX || r->z_coeff != 0.0f)
        lse = gmm__softmax(rows->logits, rows->softmax, r->experts);
    if (r->score == GMM_SCORE_SIGMOID)
        for (e = 0; e < r->experts; e++) rows->score[e] = gmm_sigmoid(rows->logits[e]);
    return lse;
}

/* x[e] = exp(logits[e] - their largest) of Sinkhorn's iteration. */
static void gmm__topk_exponentials(const float *logits, float *x, int64_t n) {
    float largest = logits[0];
    int64_t e;
    for (e = 1; e < n; e++) largest = logits[e] > largest || largest != largest ? logits[e] : largest;
    for (e = 0; e < n; e++) x[e] = gmm_exp(logits[e] - largest);
}
/* The values by which experts are chosen, in rows->weight. */
static void gmm__topk_values(const gmm__plan *plan, gmm__topk_rows *rows) {
    const gmm_route *r = &plan->call->d.route;
    const float *multipliers = (const float *)gmm__region(plan, GMM__TOPK_MULTIPLIERS);
    float *value = rows->weight;
    int64_t e;
    if (r->sinkhorn) {
        gmm__topk_exponentials(rows->logits, value, r->experts);
        for (e = 0; e < r->experts; e++) value[e] *= multipliers[e];
    } else
        for (e = 0; e < r->experts; e++) value[e] = rows->score[e] + (r->expert_bias ? r->expert_bias[e] : 0.0f);
}

/* Divisor of the chosen scores, whose sum is `chosen`. */
static float gmm__topk_divisor(const gmm_route *r, float chosen) {
    return !r->normalize ? 1.0f : r->score == GMM_SCORE_SIGMOID ? chosen + 1e-20f : chosen;
}
/* part / sum; 0 where the sum of all scores underflows to 0. */
static float gmm__quotient(float part, float sum) { return sum == 0.0f ? 0.0f : part / sum; }

/* Counts the tokens that are no padding. */
static void gmm__topk_count_valid(const gmm__plan *plan) {
    const gmm_route *r = &plan->call->d.route;
    int64_t *valid = (int64_t *)gmm__region(plan, GMM__TOPK_VALID), b, i;
    valid[r->sequences] = 0;
    for (b = 0; b < r->sequences; b++) {
        valid[b] = r->padding ? 0 : r->tokens / r->sequences;
        for (i = 0; r->padding && i < r->tokens / r->sequences; i++)
            valid[b] += !r->padding[gmm__topk_token(r, b, i)];
        valid[r->sequences] += valid[b];
    }
}
/* What a sequence's sum of count times score contributes to aux_loss, and what a squared logsumexp does to z_loss. */
static double gmm__topk_aux_factor(const gmm__plan *plan, int64_t sequence) {
    const gmm_route *r = &plan->call->d.route;
    const double n = (double)((const int64_t *)gmm__region(plan, GMM__TOPK_VALID))[sequence];
    return n == 0.0 ? 0.0 : r->aux_coeff * (double)r->experts / (r->topk * n * n) / r->sequences;
}
static double gmm__topk_z_factor(const gmm__plan *plan) {
    const gmm_route *r = &plan->call->d.route;
    const double n = (double)((const int64_t *)gmm__region(plan, GMM__TOPK_VALID))[r->sequences];
    return n == 0.0 ? 0.0 : r->z_coeff / n;
}

/* Adds up the columns of one iteration over the tokens of a chunk. */
static void gmm__sinkhorn_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const gmm__topk_range range = gmm__topk_range_of(r, c);
    const float inverse_rows = 1.0f / (float)((const int64_t *)gmm__region(plan, GMM__TOPK_VALID))[r->sequences];
    const float *multipliers = (const float *)gmm__region(plan, GMM__TOPK_MULTIPLIERS);
    float *sums = (float *)gmm__region(plan, GMM__TOPK_SUMS) + c * r->experts;
    int64_t i, e;
    memset(sums, 0, (size_t)r->experts * sizeof *sums);
    for (i = range.begin; i < range.end; i++) {
        const int64_t t = gmm__topk_token(r, range.sequence, i);
        gmm__topk_rows rows;
        float sum, multiplier;
        if (r->padding && r->padding[t]) continue;
        gmm__topk_load(plan, t, thread, &rows);
        gmm__topk_exponentials(rows.logits, rows.weight, r->experts);
        sum = gmm__row_dot(rows.weight, multipliers, r->experts);
        if (sum != sum) continue;
        multiplier = inverse_rows / (sum + 1e-8f);
        for (e = 0; e < r->experts; e++) sums[e] += multiplier * rows.weight[e];
    }
}
static void gmm__sinkhorn(const gmm__plan *plan) {
    const gmm_route *r = &plan->call->d.route;
    const float *sums = (const float *)gmm__region(plan, GMM__TOPK_SUMS);
    float *multipliers = (float *)gmm__region(plan, GMM__TOPK_MULTIPLIERS);
    const int64_t chunks = gmm__topk_chunks(r);
    float change = 2.0f * r->sinkhorn_tolerance;
    int64_t c, e;
    int32_t i;
    for (e = 0; e < r->experts; e++) multipliers[e] = 1.0f;
    for (i = 0; i < r->sinkhorn && change > r->sinkhorn_tolerance; i++) {
        double changes = 0.0;
        gmm__cpu_for(plan->call->ctx, chunks, gmm__topk_work(r), gmm__sinkhorn_chunk, plan);
        for (e = 0; e < r->experts; e++) {
            const float last = multipliers[e];
            double sum = 0.0;
            for (c = 0; c < chunks; c++) sum += sums[c * r->experts + e];
            multipliers[e] = 1.0f / (float)r->experts / ((float)sum + 1e-8f);
            changes += last > multipliers[e] ? last - multipliers[e] : multipliers[e] - last;
        }
        change = (float)(changes / r->experts);
    }
}

static void gmm__topk_fwd_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const gmm__topk_range range = gmm__topk_range_of(r, c);
    int32_t *counts = (int32_t *)gmm__region(plan, GMM__TOPK_COUNTS) + c * r->experts;
    float *score_sums = r->aux_coeff != 0.0f ? (float *)gmm__region(plan, GMM__TOPK_SUMS) + c * r->experts : NULL;
    float z = 0.0f;
    int64_t n, e;
    int32_t i;
    memset(counts, 0, (size_t)r->experts * sizeof *counts);
    if (score_sums) memset(score_sums, 0, (size_t)r->experts * sizeof *score_sums);
    for (n = range.begin; n < range.end; n++) {
        const int64_t t = gmm__topk_token(r, range.sequence, n);
        gmm__topk_rows rows;
        float *probs = r->probs + t * r->topk, chosen = 0.0f, divisor, lse;
        int32_t *indices = r->indices + t * r->topk;
        if (r->padding && r->padding[t]) {
            for (i = 0; i < r->topk; i++) indices[i] = -1;
            memset(probs, 0, (size_t)r->topk * sizeof *probs);
            continue;
        }
        lse = gmm__topk_scores(plan, t, thread, &rows);
        gmm__topk_values(plan, &rows);
        gmm__topk_choose(r, rows.weight, rows.best, rows.groups);
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
    ((float *)gmm__region(plan, GMM__TOPK_Z))[c] = z;
}

static int gmm__cpu_plan_topk_fwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    const size_t chunks = (size_t)gmm__topk_chunks(r), sums = r->aux_coeff != 0.0f || r->sinkhorn;
    gmm__reserve(plan, GMM__TOPK_SCRATCH, gmm__topk_scratch(call));
    gmm__reserve(plan, GMM__TOPK_COUNTS, chunks * (size_t)r->experts * sizeof(int32_t));
    gmm__reserve(plan, GMM__TOPK_SUMS, sums * chunks * (size_t)r->experts * sizeof(float));
    gmm__reserve(plan, GMM__TOPK_Z, chunks * sizeof(float));
    gmm__reserve(plan, GMM__TOPK_VALID, ((size_t)r->sequences + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__TOPK_MULTIPLIERS, r->sinkhorn ? gmm__topk_row_bytes(r) : 0);
    gmm__reserve(plan, GMM__TOPK_TOTAL, (size_t)r->experts * sizeof(int32_t));
    return 1;
}

/* Counts of a sequence, which are added to those of the batch in `total`, and its auxiliary loss. */
static double gmm__topk_finish_sequence(const gmm__plan *plan, int64_t sequence, int32_t *total) {
    const gmm_route *r = &plan->call->d.route;
    const int32_t *counts = (const int32_t *)gmm__region(plan, GMM__TOPK_COUNTS);
    const float *score_sums = (const float *)gmm__region(plan, GMM__TOPK_SUMS);
    const int64_t per_sequence = gmm__topk_chunks_per_sequence(r), first = sequence * per_sequence;
    double aux = 0.0;
    int64_t c, e;
    for (e = 0; e < r->experts; e++) {
        int32_t count = 0;
        double sum = 0.0;
        for (c = first; c < first + per_sequence; c++) {
            count += counts[c * r->experts + e];
            if (r->aux_coeff != 0.0f) sum += score_sums[c * r->experts + e];
        }
        aux += count * sum;
        if (r->sequence_counts) r->sequence_counts[sequence * r->experts + e] = count;
        total[e] += count;
    }
    return aux;
}

static gmm_status gmm__cpu_launch_topk_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_route *r = &plan->call->d.route;
    const int64_t chunks = gmm__topk_chunks(r);
    int32_t *total = r->counts ? r->counts : (int32_t *)gmm__region(plan, GMM__TOPK_TOTAL), first = 0;
    double aux = 0.0, z = 0.0;
    int64_t c, b, e;
    (void)stream;
    gmm__topk_count_valid(plan);
    if (r->sinkhorn) gmm__sinkhorn(plan);
    gmm__cpu_for(plan->call->ctx, chunks, gmm__topk_work(r), gmm__topk_fwd_chunk, plan);
    memset(total, 0, (size_t)r->experts * sizeof *total);
    for (b = 0; b < r->sequences; b++)
        aux += gmm__topk_aux_factor(plan, b) * gmm__topk_finish_sequence(plan, b, total);
    for (e = 0; e < r->experts; e++) {
        if (r->offsets) r->offsets[e] = first;
        if (r->total_counts) r->total_counts[e] += total[e];
        first += total[e];
    }
    if (r->offsets) r->offsets[r->experts] = first;
    for (c = 0; c < chunks; c++) z += ((const float *)gmm__region(plan, GMM__TOPK_Z))[c];
    if (r->aux_loss) *r->aux_loss = (float)aux;
    if (r->z_loss) *r->z_loss = r->z_coeff == 0.0f ? 0.0f : (float)(gmm__topk_z_factor(plan) * z);
    return GMM_OK;
}

/* Stores the gradient of token t's logits. */
static void gmm__topk_store(const gmm__call *call, int64_t t, const float *w) {
    const gmm_mat *m = &call->mat[GMM__DX];
    const int64_t experts = call->d.route.experts;
    int64_t e;
    if (m->dtype == GMM_F64)
        for (e = 0; e < experts; e++) ((double *)gmm__at(m, 0, t, 0))[e] = w[e];
    else gmm__row_store(m->dtype, gmm__at(m, 0, t, 0), w, experts);
}

/* Computes w[e] = score[e] * (gradient of score[e]) rather than the gradient itself: it contains scores only as
   quotients score / sum, which do not overflow where scores are small. */
static void gmm__topk_bwd_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const gmm__topk_range range = gmm__topk_range_of(r, c);
    /* Without the auxiliary loss sequence_counts may be NULL. */
    const int32_t *counts = r->aux_coeff == 0.0f ? NULL :
                            r->sequences > 1 ? r->sequence_counts + range.sequence * r->experts : r->counts;
    const float daux = (float)(gmm__topk_aux_factor(plan, range.sequence) *
                               (r->dloss && r->aux_coeff != 0.0f ? r->dloss[0] : 1.0f));
    const float dz = (float)(2.0 * gmm__topk_z_factor(plan) *
                             (r->dloss && r->z_coeff != 0.0f ? r->dloss[1] : 1.0f));
    int64_t n, e;
    int32_t i;
    for (n = range.begin; n < range.end; n++) {
        const int64_t t = gmm__topk_token(r, range.sequence, n);
        gmm__topk_rows rows;
        const float lse = gmm__topk_scores(plan, t, thread, &rows);
        float *w = rows.weight;
        const float *s = rows.score;
        if (r->padding && r->padding[t]) {
            memset(w, 0, (size_t)r->experts * sizeof *w);
            gmm__topk_store(plan->call, t, w);
            continue;
        }
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
                for (e = 0; e < r->experts; e++) mean += daux * (float)counts[e] * gmm__quotient(s[e], all);
            }
            for (e = 0; e < r->experts; e++) w[e] += gmm__quotient(s[e], all) * (daux * (float)counts[e] - mean);
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
        gmm__topk_store(plan->call, t, w);
    }
}

static int gmm__cpu_plan_topk_bwd(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, GMM__TOPK_SCRATCH, gmm__topk_scratch(call));
    gmm__reserve(plan, GMM__TOPK_VALID, ((size_t)call->d.route.sequences + 1) * sizeof(int64_t));
    return 1;
}

static gmm_status gmm__cpu_launch_topk_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_route *r = &plan->call->d.route;
    (void)stream;
    gmm__topk_count_valid(plan);
    gmm__cpu_for(plan->call->ctx, gmm__topk_chunks(r), gmm__topk_work(r), gmm__topk_bwd_chunk, plan);
    return GMM_OK;
}

/* --- dense routings, expert bias --- */

enum { GMM__DENSE_CHUNK = 64 }; /* tokens of a task */

static void gmm__dense_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__call *call = (const gmm__call *)arg;
    const gmm_dense_route *d = &call->d.dense;
    const int64_t begin = c * GMM__DENSE_CHUNK, last = begin + GMM__DENSE_CHUNK;
    const int64_t E = d->experts, end = last < d->tokens ? last : d->tokens;
    int64_t t, e;
    int32_t i;
    (void)thread;
    for (t = begin; t < end; t++) {
        uint8_t *map = d->map ? d->map + t * E : NULL;
        float *values = d->values ? d->values + t * E : NULL, *probs = d->probs ? d->probs + t * d->topk : NULL;
        int32_t *indices = d->indices + t * d->topk;
        if (call->op == GMM_OP_ROUTE_TO_DENSE) {
            if (map) memset(map, 0, (size_t)E);
            if (values) memset(values, 0, (size_t)E * sizeof *values);
            for (i = 0; i < d->topk; i++) {
                if (indices[i] < 0 || indices[i] >= E) continue;
                if (map) map[indices[i]] = 1;
                if (values) values[indices[i]] += probs[i];
            }
            continue;
        }
        if (map) {
            for (e = 0, i = 0; e < E && i < d->topk; e++)
                if (map[e]) indices[i++] = (int32_t)e;
            for (; i < d->topk; i++) indices[i] = -1;
        }
        for (i = 0; values && i < d->topk; i++)
            probs[i] = indices[i] < 0 || indices[i] >= E ? 0.0f : values[indices[i]];
    }
}
static gmm_status gmm__cpu_launch_dense(const gmm__plan *plan, gmm_stream stream) {
    const gmm_dense_route *d = &plan->call->d.dense;
    int32_t first = 0;
    int64_t i, e;
    (void)stream;
    gmm__cpu_for(plan->call->ctx, gmm__ceil_div(d->tokens, GMM__DENSE_CHUNK), (double)d->tokens * (double)d->experts,
                 gmm__dense_chunk, plan->call);
    if (!d->counts) return GMM_OK;
    memset(d->counts, 0, (size_t)d->experts * sizeof *d->counts);
    for (i = 0; i < d->tokens * d->topk; i++)
        if (d->indices[i] >= 0) d->counts[d->indices[i]]++;
    for (e = 0; d->offsets && e < d->experts; first += d->counts[e++]) d->offsets[e] = first;
    if (d->offsets) d->offsets[d->experts] = first;
    return GMM_OK;
}

static gmm_status gmm__cpu_launch_expert_bias(const gmm__plan *plan, gmm_stream stream) {
    const gmm_expert_bias *d = &plan->call->d.bias;
    int64_t l, e;
    (void)stream;
    for (l = 0; l < d->layers; l++) {
        int64_t *counts = d->total_counts + l * d->experts, sum = 0;
        float *bias = d->bias + l * d->experts;
        for (e = 0; e < d->experts; e++) sum += counts[e];
        for (e = 0; e < d->experts; e++) {
            const int64_t above = counts[e] * d->experts; /* compared with the sum: no mean is rounded */
            bias[e] += above < sum ? d->rate : above > sum ? -d->rate : 0.0f;
            counts[e] = 0;
        }
    }
    return GMM_OK;
}

