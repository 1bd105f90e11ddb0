#if GMM__HOLDS(0)
/* The best of a lane's experts, and its sort key; 0 where none is left. Of equal keys the lowest expert is the best. */
typedef struct gmm__route_best {
    uint32_t key;
    int32_t e;
} gmm__route_best;
/* Writes the next key of a lane, whose experts rise from call to call. */
GMM__DEVICE void gmm__route_put_key(uint32_t *keys, int32_t e, uint32_t key, gmm__route_best *best) {
    keys[gmm__route_key_at(e)] = key;
    if (key <= best->key) return;
    best->key = key;
    best->e = e;
}

/* gmm__score_key of scores, which are never negative, in fewer instructions: 1 for NaN, 2 and more for numbers. 0 is
   left for experts that cannot be chosen. */
GMM__DEVICE uint32_t gmm__nonnegative_key(float s) { return s == s ? gmm_f32_bits(s) + 2u : 1u; }

/* Makes scores of what gmm__route_exponentials leaves in x, and their sort keys. Places behind the last expert get the
   score 0, or NaN where all scores are NaN: no key is less than theirs, and of equal keys the lowest index wins, so
   that every expert comes before them. */
GMM__DEVICE gmm__route_best gmm__route_softmax_keys(int32_t experts, float z, float *x, uint32_t *keys) {
    const int32_t rows = gmm__route_rows(experts), lane = gmm__lane();
    gmm__route_best best = { 0u, 0 };
    int32_t i;
#pragma unroll 4
    for (i = 0; i < rows; i++) {
        const float s = x[32 * i + lane] / z;
        x[32 * i + lane] = s;
        gmm__route_put_key(keys, 32 * i + lane, gmm__nonnegative_key(s), &best);
    }
    return best;
}
GMM__DEVICE gmm__route_best gmm__route_sigmoid_keys(int32_t experts, float *x, uint32_t *keys) {
    const int32_t rows = gmm__route_rows(experts), lane = gmm__lane();
    gmm__route_best best = { 0u, 0 };
    int32_t i;
#pragma unroll 2
    for (i = 0; i < rows; i++) {
        const float s = gmm_sigmoid(x[32 * i + lane]);
        x[32 * i + lane] = s;
        if (32 * i + lane < experts)
            gmm__route_put_key(keys, 32 * i + lane, gmm__nonnegative_key(s), &best);
    }
    return best;
}
/* Adds a token's normalised scores to `sums`, which start with those of the first token. */
GMM__DEVICE void gmm__route_add_scores(const gmm__route_args *a, const float *x, float *sums, int32_t first) {
    const int32_t rows = gmm__route_rows(a->experts), lane = gmm__lane();
    float total = 0.0f;
    int32_t i;
    if (!a->sigmoid) {
#pragma unroll 1
        for (i = 0; i < rows; i++) sums[32 * i + lane] = (first ? 0.0f : sums[32 * i + lane]) + x[32 * i + lane];
        return;
    }
#pragma unroll 1
    for (i = 0; i < rows; i++) total += x[32 * i + lane];
    total = gmm__warp_sum(total);
#pragma unroll 1
    for (i = 0; i < rows; i++)
        sums[32 * i + lane] = (first ? 0.0f : sums[32 * i + lane]) + gmm__safe_quotient(x[32 * i + lane], total);
}
/* Makes sort keys of the values by which experts are chosen, where these are not the scores x. The key of an expert
   that cannot be chosen is 0. */
GMM__DEVICE gmm__route_best gmm__route_values(const gmm__route_args *a, int64_t t, float m, const float *x,
                                              uint32_t *keys, float *values, float *group_sums) {
    const int32_t members = a->groups > 1 ? a->experts / a->groups : a->experts;
    gmm__route_best best = { 0u, 0 };
    uint64_t group_key = 0;
    int32_t e;
#pragma unroll 1
    for (e = gmm__lane(); e < a->experts; e += 32) {
        float v = x[e];
        if (a->expert_bias) v += a->expert_bias[e];
        if (a->multipliers) v = gmm_exp(gmm__route_load(&a->logits, t, e) - m) * a->multipliers[e];
        if (a->groups > 1) values[gmm__route_key_at(e)] = v;
        else gmm__route_put_key(keys, e, gmm__score_key(v), &best);
    }
    if (a->groups <= 1) return best;
    group_key = gmm__route_choose_groups(a, values, group_sums);
#pragma unroll 1
    for (e = gmm__lane(); e < a->experts; e += 32) {
        const int32_t g = e / members, chosen = gmm__sort_key(group_sums[g], g) >= group_key;
        gmm__route_put_key(keys, e, chosen ? gmm__score_key(values[gmm__route_key_at(e)]) : 0u, &best);
    }
    return best;
}

/* Takes the best `count` experts that are left; lane i receives the i-th. count <= 32, experts <= 1024, and at least
   `count` experts have keys above 0. Expert e belongs to lane e % 32, which keeps the best of its experts in `best`.
   Once that one is chosen, the whole warp searches the lane's next best, each lane one row of 32 keys, so that the time
   hardly depends on the number of experts. */
GMM__DEVICE int32_t gmm__route_take(uint32_t *keys, int32_t experts, int32_t count, gmm__route_best *best) {
    const uint32_t all = 0xFFFFFFFFu;
    const int32_t lane = gmm__lane();
    int32_t chosen = 0, i;
#pragma unroll 2
    for (i = 0; i < count; i++) {
        const uint32_t key = __reduce_max_sync(all, best->key);
        const int32_t e = (int32_t)__reduce_min_sync(all, best->key == key ? (uint32_t)best->e : all), owner = e & 31;
        const int32_t mine = 32 * lane + owner, at = GMM__ROUTE_PITCH * lane + owner; /* gmm__route_key_at(mine) */
        const uint32_t k = mine < experts && mine != e ? keys[at] : 0u, next = __reduce_max_sync(all, k);
        const int32_t next_e = (int32_t)__reduce_min_sync(all, k == next ? (uint32_t)mine : all);
        if (mine == e) keys[at] = 0u;
        if (lane == owner) {
            best->key = next;
            best->e = next_e;
        }
        if (lane == i) chosen = e;
        __syncwarp();
    }
    return chosen;
}
/* The same for more than 1024 experts: a lane reads several rows. */
GMM__DEVICE int32_t gmm__route_take_many(uint32_t *keys, int32_t experts, int32_t count, gmm__route_best *best) {
    const uint32_t all = 0xFFFFFFFFu;
    const int32_t lane = gmm__lane();
    int32_t chosen = 0, i, mine;
#pragma unroll 1
    for (i = 0; i < count; i++) {
        const uint32_t key = __reduce_max_sync(all, best->key);
        const int32_t e = (int32_t)__reduce_min_sync(all, best->key == key ? (uint32_t)best->e : all), owner = e & 31;
        gmm__route_best next = { 0u, 0 };
        uint32_t k;
        if (lane == owner) keys[gmm__route_key_at(e)] = 0u;
        __syncwarp();
#pragma unroll 1
        for (mine = 32 * lane + owner; mine < experts; mine += 1024) {
            k = keys[gmm__route_key_at(mine)];
            if (k <= next.key) continue;
            next.key = k;
            next.e = mine;
        }
        k = __reduce_max_sync(all, next.key);
        mine = (int32_t)__reduce_min_sync(all, next.key == k ? (uint32_t)next.e : all);
        if (lane == owner) {
            best->key = k;
            best->e = mine;
        }
        if (lane == i) chosen = e;
    }
    return chosen;
}

/* Chooses the experts of a token by their keys, and writes indices and probabilities. With count_in_cta the CTA's
   counts in shared memory are raised, else those in global memory. */
GMM__DEVICE void gmm__route_choose(const gmm__route_args *a, int64_t t, int64_t sequence, const float *x,
                                   uint32_t *keys, gmm__route_best best, int32_t *cta_counts) {
    const int32_t lane = gmm__lane(), several = a->topk > 32;
    int32_t *indices = a->indices + t * a->topk, base, i;
    float *probs = a->probs + t * a->topk, s = 0.0f, selected_sum = 0.0f, divisor = 1.0f;
    __syncwarp();
#pragma unroll 1
    for (base = 0; base < a->topk; base += 32) {
        const int32_t n = min(a->topk - base, 32);
        const int32_t e = a->experts <= 1024 ? gmm__route_take(keys, a->experts, n, &best)
                                             : gmm__route_take_many(keys, a->experts, n, &best);
        if (lane < n) {
            indices[base + lane] = e;
            s = x[e];
            selected_sum += s;
            if (several) probs[base + lane] = s;
            if (a->count_in_cta) atomicAdd(&cta_counts[e], 1);
            else if (a->counts) atomicAdd(&a->counts[e], 1);
            if (a->sequence_counts) atomicAdd(&a->sequence_counts[sequence * a->experts + e], 1);
        }
    }
    __syncwarp();
    if (a->normalize) {
        selected_sum = gmm__warp_sum(selected_sum);
        divisor = a->sigmoid ? selected_sum + 1e-20f : selected_sum;
    }
#pragma unroll 1
    for (i = lane; i < a->topk; i += 32) {
        if (several) s = probs[i];
        probs[i] = a->scale * gmm__safe_quotient(s, divisor);
    }
}

/* Routes a warp's tokens with its arrays. */
GMM__DEVICE void gmm__route_tokens(const gmm__route_args *a, float *x, int32_t *cta_counts) {
    const uint32_t warps = blockDim.x / 32u;
    const int32_t lane = gmm__lane(), rows = gmm__route_rows(a->experts);
    float *values = x + 32 * (int64_t)rows, *sums = values + GMM__ROUTE_PITCH * (int64_t)rows;
    float *group_sums = sums + (a->sums ? 32 * (int64_t)rows : 0);
    uint32_t *keys = (uint32_t *)(void *)values;
    uint32_t c, n;
    int32_t i;
    for (c = blockIdx.x * warps + (uint32_t)gmm__warp(); c < a->chunks; c += gridDim.x * warps) {
        const uint32_t sequence = a->sequences > 1 ? c / a->sequence_chunks : 0;
        const uint32_t first = (c - sequence * a->sequence_chunks) * a->chunk;
        const uint32_t last = min(first + a->chunk, a->length);
        float z_sum = 0.0f;
        for (n = first; n < last; n++) {
            const int64_t t = gmm__route_token(a, sequence, n);
            gmm__route_best best;
            float m, z = 1.0f;
            if (gmm__route_is_padding(a, t)) {
#pragma unroll 1
                for (i = lane; i < a->topk; i += 32) {
                    a->indices[t * a->topk + i] = -1;
                    a->probs[t * a->topk + i] = 0.0f;
                }
#pragma unroll 1
                for (i = 0; a->sums && n == first && i < rows; i++) sums[32 * i + lane] = 0.0f;
                continue;
            }
            m = gmm__route_read(a, t, x);
            if (a->softmax) gmm__route_exponentials(a, x, &m, &z);
            if (a->sums && a->z_loss) z_sum += (m + logf(z)) * (m + logf(z));
            if (a->sigmoid) best = gmm__route_sigmoid_keys(a->experts, x, keys);
            else best = gmm__route_softmax_keys(a->experts, z, x, keys);
            if (a->sums) gmm__route_add_scores(a, x, sums, n == first);
            if (a->values) best = gmm__route_values(a, t, m, x, keys, values, group_sums);
            gmm__route_choose(a, t, sequence, x, keys, best, cta_counts);
        }
        if (a->sums) {
            float *chunk_sums = a->sums + (int64_t)c * (a->experts + 1);
#pragma unroll 1
            for (i = lane; i < a->experts; i += 32) chunk_sums[i] = sums[i];
            if (lane == 0) chunk_sums[a->experts] = z_sum;
        }
    }
}

/* Selects the topk experts of each token and writes their indices and probabilities. A warp takes `chunk` consecutive
   tokens of a sequence at a time; with losses these are GMM__ROUTE_CHUNK, whose loss terms it adds up in order. With
   count_in_cta each CTA counts in shared memory, behind its warps' arrays, since atomics on the same words of global
   memory are slow. */
GMM__KERNEL __launch_bounds__(GMM__ROUTE_BLOCK, GMM__ROUTE_PER_SM)
    gmm_route_topk(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    extern __shared__ float gmm__route_shared[];
    const int32_t floats = (int32_t)gmm__route_topk_floats(a.experts, a.groups, a.sums != NULL);
    float *x = gmm__route_shared + gmm__warp() * floats;
    int32_t *counts = (int32_t *)(void *)(gmm__route_shared + (int32_t)(blockDim.x / 32u) * floats), e;
    if (a.count_in_cta) {
        for (e = (int32_t)threadIdx.x; e < a.experts; e += (int32_t)blockDim.x) counts[e] = 0;
        __syncthreads();
    }
    gmm__route_tokens(&a, x, counts);
    if (a.count_in_cta) {
        __syncthreads();
        for (e = (int32_t)threadIdx.x; e < a.experts; e += (int32_t)blockDim.x)
            if (counts[e]) atomicAdd(&a.counts[e], counts[e]);
    }
}
/* The same with the warps' arrays in `scratch`. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_topk_scratch(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int64_t floats = gmm__route_topk_floats(a.experts, a.groups, a.sums != NULL);
    gmm__route_tokens(&a, gmm__route_scratch(&a, floats), NULL);
}
#endif /* GMM__HOLDS(0) */

