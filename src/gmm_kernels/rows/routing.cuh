/* ...................................................................................................... Routing ... */

#if GMM__HOLDS(0)
/* Sort key of a score: larger scores first, then lower expert indices; NaN is behind all numbers. A key is never 0. */
GMM__DEVICE uint64_t gmm__sort_key(float v, int32_t e) {
    const uint32_t u = gmm_f32_bits(v);
    const uint32_t key = (u & 0x7FFFFFFFu) > 0x7F800000u ? 0u : u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)key << 32 | (0xFFFFFFFFu - (uint32_t)e);
}

GMM__DEVICE uint64_t gmm__warp_max_key(uint64_t v) {
    const uint32_t hi = __reduce_max_sync(0xFFFFFFFFu, (uint32_t)(v >> 32));
    const uint32_t lo = __reduce_max_sync(0xFFFFFFFFu, (uint32_t)(v >> 32) == hi ? (uint32_t)v : 0u);
    return (uint64_t)hi << 32 | lo;
}

/* An element of the logits, rounded to fp32, and of their gradient. */
GMM__DEVICE float gmm__route_load(const gmm__view *m, int64_t t, int32_t e) {
    if (m->dtype == GMM_F64) return (float)((const double *)m->data)[t * m->ld + e];
    return gmm__load_f32(m, t, e);
}
GMM__DEVICE void gmm__route_store(const gmm__view *m, int64_t t, int32_t e, float v) {
    if (m->dtype == GMM_F64) ((double *)m->data)[t * m->ld + e] = (double)v;
    else gmm__store_f32(m, t, e, v);
}

/* Token i of a sequence, and the sequence of a token. */
GMM__DEVICE int64_t gmm__route_token(const gmm__route_args *a, int64_t sequence, int64_t i) {
    if (a->sequences == 1) return i;
    return a->sequence_first ? i * a->sequences + sequence : sequence * (a->tokens / a->sequences) + i;
}
GMM__DEVICE int64_t gmm__route_sequence(const gmm__route_args *a, int64_t t) {
    if (a->sequences == 1) return 0;
    return a->sequence_first ? t % a->sequences : t / (a->tokens / a->sequences);
}
GMM__DEVICE int32_t gmm__route_is_padding(const gmm__route_args *a, int64_t t) {
    return a->padding && a->padding[t];
}

/* The coefficients of the losses, as gmm__route_args describes them. The whole warp calls the second one. */
GMM__DEVICE float gmm__route_aux(const gmm__route_args *a, int64_t sequence) {
    double n;
    if (!a->valid) return a->aux;
    n = (double)a->valid[sequence];
    return n == 0.0 ? 0.0f : (float)((double)a->aux / (n * n));
}
/* Number of tokens that are no padding. */
GMM__DEVICE int64_t gmm__route_valid_tokens(const gmm__route_args *a) {
    int64_t n = 0, b;
    if (!a->valid) return a->tokens;
    for (b = gmm__lane(); b < a->sequences; b += 32) n += a->valid[b];
    return __shfl_sync(0xFFFFFFFFu, gmm__warp_scan(n), 31);
}
GMM__DEVICE float gmm__route_z(const gmm__route_args *a) {
    const int64_t n = a->valid ? gmm__route_valid_tokens(a) : 1;
    return n == 0 ? 0.0f : (float)((double)a->z / (double)n);
}

/* Largest logit of a token, and the sum of exp(logit - largest). */
GMM__DEVICE void gmm__route_softmax(const gmm__route_args *a, int64_t t, float *largest, float *sum) {
    float m = gmm_f32_from_bits(0xFF800000u), z = 0.0f;
    int32_t e;
    for (e = gmm__lane(); e < a->experts; e += 32) m = fmaxf(m, gmm__route_load(&a->logits, t, e));
    m = gmm__warp_max(m);
    for (e = gmm__lane(); e < a->experts; e += 32) z += gmm_exp(gmm__route_load(&a->logits, t, e) - m);
    *largest = m;
    *sum = gmm__warp_sum(z);
}

GMM__DEVICE float gmm__route_score(const gmm__route_args *a, int64_t t, int32_t e, float largest, float sum) {
    const float l = gmm__route_load(&a->logits, t, e);
    return a->sigmoid ? gmm_sigmoid(l) : gmm_exp(l - largest) / sum;
}

/* part / sum, or 0 where the scores are so small that their sum underflows to 0 in fp32. */
GMM__DEVICE float gmm__safe_quotient(float part, float sum) { return sum == 0.0f ? 0.0f : part / sum; }

/* Floats of a warp's array: one for each expert, and for each group where there are several. */
GMM__HD int32_t gmm__route_floats(int32_t experts, int32_t groups) { return experts + (groups > 1 ? groups : 0); }
/* A warp's array: in shared memory, or in `scratch` where it does not fit. */
GMM__DEVICE float *gmm__route_array(const gmm__route_args *a) {
    extern __shared__ float gmm__route_shared[];
    const int64_t warps = blockDim.x / 32u, floats = gmm__route_floats(a->experts, a->groups);
    return a->scratch ? a->scratch + ((int64_t)blockIdx.x * warps + gmm__warp()) * floats
                      : gmm__route_shared + (int64_t)gmm__warp() * floats;
}

/* Counts the tokens of each sequence that are no padding. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_valid(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t count = 0;
    for (; t < a.tokens; t += step) {
        if (a.padding[t]) continue;
        if (a.sequences > 1) atomicAdd(&a.valid[gmm__route_sequence(&a, t)], 1);
        else count++;
    }
    if (a.sequences > 1) return;
    count = __shfl_sync(0xFFFFFFFFu, gmm__warp_scan(count), 31);
    if (gmm__lane() == 0 && count) atomicAdd(a.valid, (int32_t)count);
}

/* The sum of the `count` largest of n values, in falling order. One thread. */
GMM__DEVICE float gmm__route_group_sum(const float *value, int32_t n, int32_t count) {
    uint64_t previous_key = ~(uint64_t)0;
    float sum = 0.0f;
    int32_t e, i;
    for (i = 0; i < count; i++) {
        uint64_t max_key = 0;
        for (e = 0; e < n; e++) {
            const uint64_t key = gmm__sort_key(value[e], e);
            if (key < previous_key && key > max_key) max_key = key;
        }
        previous_key = max_key;
        sum += value[0xFFFFFFFFu - (uint32_t)max_key];
    }
    return sum;
}
/* Chooses the group_topk groups of a token by the values of its experts. Writes the groups' sums behind the values, and
   returns the key of the last group that is chosen. */
GMM__DEVICE uint64_t gmm__route_choose_groups(const gmm__route_args *a, float *value) {
    const int32_t members = a->experts / a->groups;
    uint64_t last_key = ~(uint64_t)0;
    float *sums = value + a->experts;
    int32_t g, i;
    __syncwarp();
    for (g = gmm__lane(); g < a->groups; g += 32)
        sums[g] = gmm__route_group_sum(value + g * members, members, a->group_sum);
    for (i = 0; i < a->group_topk; i++) {
        uint64_t max_key = 0;
        for (g = gmm__lane(); g < a->groups; g += 32) {
            const uint64_t key = gmm__sort_key(sums[g], g);
            if (key < last_key && key > max_key) max_key = key;
        }
        last_key = gmm__warp_max_key(max_key);
    }
    __syncwarp();
    return last_key;
}

/* Sinkhorn's iteration: adds up the columns of the balanced matrix. One warp per chunk of GMM__ROUTE_CHUNK tokens, in
   their order; padding and tokens with NaN are left out. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_sinkhorn(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int64_t warps = blockDim.x / 32u, stride = (int64_t)gridDim.x * warps;
    const int64_t chunks = (a.tokens + GMM__ROUTE_CHUNK - 1) / GMM__ROUTE_CHUNK;
    const float inverse_rows = 1.0f / (float)gmm__route_valid_tokens(&a);
    const int32_t lane = gmm__lane();
    float *x = gmm__route_array(&a);
    int64_t c, t;
    int32_t e;
    if (a.multipliers[a.experts] != 0.0f) return; /* converged */
    for (c = (int64_t)blockIdx.x * warps + gmm__warp(); c < chunks; c += stride) {
        const int64_t last_token = (c + 1) * GMM__ROUTE_CHUNK < a.tokens ? (c + 1) * GMM__ROUTE_CHUNK : a.tokens;
        float *sums = a.sums + c * (a.experts + (int64_t)1);
        for (e = lane; e <= a.experts; e += 32) sums[e] = 0.0f;
        for (t = c * GMM__ROUTE_CHUNK; t < last_token; t++) {
            float m, z, row = 0.0f, multiplier;
            if (gmm__route_is_padding(&a, t)) continue;
            gmm__route_softmax(&a, t, &m, &z);
            for (e = lane; e < a.experts; e += 32) {
                x[e] = gmm_exp(gmm__route_load(&a.logits, t, e) - m);
                row += x[e] * a.multipliers[e];
            }
            row = gmm__warp_sum(row);
            if (row != row) continue;
            multiplier = inverse_rows / (row + 1e-8f);
            /* the same lane always updates expert e */
            for (e = lane; e < a.experts; e += 32) sums[e] += multiplier * x[e];
        }
    }
}
/* Sets the multipliers of experts: to 1 without `sums`, else to those that balance the columns. One warp. */
GMM__KERNEL __launch_bounds__(32, 1) gmm_route_balance(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int32_t lane = gmm__lane();
    float change = 0.0f;
    int32_t e;
    if (a.sums && a.multipliers[a.experts] != 0.0f) return;
    for (e = lane; e < a.experts; e += 32) {
        const float multiplier = a.sums ? 1.0f / (float)a.experts / (a.sums[e] + 1e-8f) : 1.0f;
        if (a.sums) change += fabsf(multiplier - a.multipliers[e]);
        a.multipliers[e] = multiplier;
    }
    change = gmm__warp_sum(change) / (float)a.experts;
    __syncwarp();
    if (lane == 0) a.multipliers[a.experts] = a.sums && change <= a.tolerance ? 1.0f : 0.0f;
}

/* Selects the topk experts of each token and writes their indices and probabilities. One warp per token or, with
   losses, per chunk of GMM__ROUTE_CHUNK tokens, whose loss terms the warp adds up in order. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_topk(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const uint32_t warps = blockDim.x / 32u, stride = gridDim.x * warps; /* T topk < 2^31 */
    const uint32_t chunk = a.sums ? GMM__ROUTE_CHUNK : 1, length = (uint32_t)a.tokens / (uint32_t)a.sequences;
    const uint32_t per_sequence = (length + chunk - 1) / chunk, chunks = per_sequence * (uint32_t)a.sequences;
    const int32_t lane = gmm__lane(), members = a.experts / a.groups;
    float *value = gmm__route_array(&a);
    uint32_t c;
    for (c = blockIdx.x * warps + (uint32_t)gmm__warp(); c < chunks; c += stride) {
        const uint32_t sequence = a.sequences > 1 ? c / per_sequence : 0, first = (c - sequence * per_sequence) * chunk;
        const uint32_t last = first + chunk < length ? first + chunk : length;
        float *sums = a.sums ? a.sums + (int64_t)c * (a.experts + 1) : NULL, z_sum = 0.0f;
        uint32_t n;
        for (n = first; n < last; n++) {
            const int64_t t = gmm__route_token(&a, sequence, n);
            float m = 0.0f, z = 1.0f, total = 1.0f, selected_sum = 0.0f, divisor = 1.0f;
            uint64_t previous_key = ~(uint64_t)0, group_key = 0;
            int32_t e, i;
            if (gmm__route_is_padding(&a, t)) {
                for (i = lane; i < a.topk; i += 32) {
                    a.indices[t * a.topk + i] = -1;
                    a.probs[t * a.topk + i] = 0.0f;
                }
                for (e = lane; sums && n == first && e < a.experts; e += 32) sums[e] = 0.0f;
                continue;
            }
            if (!a.sigmoid || (sums && a.z_loss) || a.multipliers) gmm__route_softmax(&a, t, &m, &z);
            if (sums && a.sigmoid) {
                total = 0.0f;
                for (e = lane; e < a.experts; e += 32) total += gmm__route_score(&a, t, e, m, z);
                total = gmm__warp_sum(total);
            }
            for (e = lane; e < a.experts; e += 32) {
                const float s = gmm__route_score(&a, t, e, m, z);
                const float normalized = a.sigmoid ? gmm__safe_quotient(s, total) : s;
                value[e] = a.expert_bias ? s + a.expert_bias[e] : s;
                if (a.multipliers) value[e] = gmm_exp(gmm__route_load(&a.logits, t, e) - m) * a.multipliers[e];
                if (sums) /* the same lane always updates expert e */
                    sums[e] = n == first ? normalized : sums[e] + normalized;
            }
            if (a.groups > 1) group_key = gmm__route_choose_groups(&a, value);
            if (sums && a.z_loss) z_sum += (m + logf(z)) * (m + logf(z));
            for (i = 0; i < a.topk; i++) {
                uint64_t max_key = 0;
                for (e = lane; e < a.experts; e += 32) {
                    const uint64_t key = gmm__sort_key(value[e], e);
                    const int32_t g = a.groups > 1 ? e / members : 0;
                    if (a.groups > 1 && gmm__sort_key(value[a.experts + g], g) < group_key) continue;
                    if (key < previous_key && key > max_key) max_key = key;
                }
                previous_key = gmm__warp_max_key(max_key);
                if (lane == i % 32) a.indices[t * a.topk + i] = (int32_t)(0xFFFFFFFFu - (uint32_t)previous_key);
            }
            for (i = lane; i < a.topk; i += 32) { /* each lane reads the indices that it wrote */
                e = a.indices[t * a.topk + i];
                selected_sum += gmm__route_score(&a, t, e, m, z);
                if (a.counts) atomicAdd(&a.counts[e], 1);
                if (a.sequence_counts) atomicAdd(&a.sequence_counts[(int64_t)sequence * a.experts + e], 1);
            }
            if (a.normalize) selected_sum = gmm__warp_sum(selected_sum);
            if (a.normalize) divisor = a.sigmoid ? selected_sum + 1e-20f : selected_sum;
            for (i = lane; i < a.topk; i += 32) {
                const float s = gmm__route_score(&a, t, a.indices[t * a.topk + i], m, z);
                a.probs[t * a.topk + i] = a.scale * gmm__safe_quotient(s, divisor);
            }
        }
        if (sums && lane == 0) sums[a.experts] = z_sum;
    }
}

/* Adds up partial sums, GMM__ROUTE_FOLD rows at a time: in [batch][rows][cols] -> out [batch][ceil(rows /
   GMM__ROUTE_FOLD)][cols]. A CTA processes 32 columns of one fold; each warp adds a quarter of the rows. */
typedef struct gmm__fold_args {
    const float *in;
    float *out;
    int64_t rows, cols, batch;
} gmm__fold_args;

GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_fold(const __grid_constant__ gmm__fold_args a) {
    gmm_pdl_wait();
    __shared__ float part[GMM__ELEM_WARPS][32];
    const int64_t tiles = (a.cols + 31) / 32, folds = (a.rows + GMM__ROUTE_FOLD - 1) / GMM__ROUTE_FOLD;
    int64_t i;
    for (i = blockIdx.x; i < tiles * folds * a.batch; i += gridDim.x) {
        const int64_t fold = i / tiles, col = (i - fold * tiles) * 32 + gmm__lane(), b = fold / folds;
        const int64_t first = (fold - b * folds) * GMM__ROUTE_FOLD +
                              gmm__warp() * (GMM__ROUTE_FOLD / GMM__ELEM_WARPS);
        const float *in = a.in + b * a.rows * a.cols;
        float sum = 0.0f;
        int32_t k;
#pragma unroll
        for (k = 0; k < GMM__ROUTE_FOLD / GMM__ELEM_WARPS; k++)
            if (col < a.cols && first + k < a.rows) sum += in[(first + k) * a.cols + col];
        part[gmm__warp()][gmm__lane()] = sum;
        __syncthreads();
        if (gmm__warp() == 0 && col < a.cols) {
            for (k = 1; k < GMM__ELEM_WARPS; k++) sum += part[k][gmm__lane()];
            a.out[fold * a.cols + col] = sum;
        }
        __syncthreads();
    }
}

/* offsets = prefix sums of the counts; aux_loss and z_loss from the sums over all tokens. One warp. */
GMM__KERNEL __launch_bounds__(32, 1) gmm_route_finish(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int32_t lane = gmm__lane();
    int32_t base;
    int64_t begin = 0, b;
    float sum;
    if (a.offsets && lane == 0) a.offsets[0] = 0;
    for (base = 0; a.offsets && base < a.experts; base += 32) {
        const int32_t e = base + lane;
        const int64_t end = begin + gmm__warp_scan(e < a.experts ? a.counts[e] : 0);
        if (e < a.experts) a.offsets[e + 1] = (int32_t)end;
        begin = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    for (base = lane; a.total_counts && base < a.experts; base += 32) a.total_counts[base] += a.counts[base];
    if (a.aux_loss) {
        float loss = 0.0f;
        for (b = 0; a.sums && a.aux != 0.0f && b < a.sequences; b++) {
            const int32_t *counts = a.sequence_counts ? a.sequence_counts + b * a.experts : a.counts;
            const float *sums = a.sums + b * (a.experts + (int64_t)1);
            sum = 0.0f;
            for (base = lane; base < a.experts; base += 32) sum += (float)counts[base] * sums[base];
            loss += gmm__route_aux(&a, b) * gmm__warp_sum(sum);
        }
        if (lane == 0) a.aux_loss[0] = loss;
    }
    if (a.z_loss) {
        const float z = gmm__route_z(&a);
        sum = 0.0f;
        for (b = lane; a.sums && a.z != 0.0f && b < a.sequences; b += 32)
            sum += a.sums[b * (a.experts + (int64_t)1) + a.experts];
        sum = gmm__warp_sum(sum);
        if (lane == 0) a.z_loss[0] = z * sum;
    }
}

/* dlogits of each token from the gradients of probabilities and losses. One warp per token. w[e] is the score times
   its gradient: every score in a denominator then meets a score in a numerator, which avoids quotients of two small
   numbers. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_gradient(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int64_t warps = blockDim.x / 32u, stride = (int64_t)gridDim.x * warps;
    const int32_t lane = gmm__lane();
    const float z_scale = a.z != 0.0f ? (a.dloss ? a.dloss[1] : 1.0f) * 2.0f * gmm__route_z(&a) : 0.0f;
    float *w = gmm__route_array(&a);
    int64_t t;
    for (t = (int64_t)blockIdx.x * warps + gmm__warp(); t < a.tokens; t += stride) {
        const int64_t sequence = gmm__route_sequence(&a, t);
        const int32_t *counts = a.sequence_counts ? a.sequence_counts + sequence * a.experts : a.counts;
        const float aux = a.aux != 0.0f ? (a.dloss ? a.dloss[0] : 1.0f) * gmm__route_aux(&a, sequence) : 0.0f;
        float m = 0.0f, z = 1.0f, total = 1.0f, mean = 0.0f;
        int32_t e, i;
        if (gmm__route_is_padding(&a, t)) {
            for (e = lane; e < a.experts; e += 32) gmm__route_store(&a.dlogits, t, e, 0.0f);
            continue;
        }
        if (!a.sigmoid || a.z != 0.0f) gmm__route_softmax(&a, t, &m, &z);

        /* auxiliary loss: q_e, the normalised score, has the gradient aux c_e */
        if (a.aux != 0.0f && a.sigmoid) {
            float sum = 0.0f;
            for (e = lane; e < a.experts; e += 32) sum += gmm__route_score(&a, t, e, m, z);
            total = gmm__warp_sum(sum);
            for (e = lane; e < a.experts; e += 32)
                mean += aux * (float)counts[e] * gmm__safe_quotient(gmm__route_score(&a, t, e, m, z), total);
            mean = gmm__warp_sum(mean);
        }
        for (e = lane; e < a.experts; e += 32)
            w[e] = a.aux == 0.0f ? 0.0f : gmm__safe_quotient(gmm__route_score(&a, t, e, m, z), total) *
                                              (aux * (float)counts[e] - mean);

        /* probabilities: scale s_i / D, where D is the sum over the selected scores if they are normalised, else 1 */
        if (a.dprobs) {
            const int32_t *selected = a.indices + t * a.topk;
            const float *g = a.dprobs + t * a.topk;
            float divisor = 1.0f, weighted_sum = 0.0f;
            if (a.normalize) {
                float sum = 0.0f;
                for (i = 0; i < a.topk; i++)
                    if ((uint32_t)selected[i] < (uint32_t)a.experts) sum += gmm__route_score(&a, t, selected[i], m, z);
                divisor = a.sigmoid ? sum + 1e-20f : sum;
                for (i = 0; i < a.topk; i++)
                    if ((uint32_t)selected[i] < (uint32_t)a.experts)
                        weighted_sum += g[i] * gmm__safe_quotient(gmm__route_score(&a, t, selected[i], m, z), divisor);
            }
            for (i = 0; i < a.topk; i++) { /* the lane that holds expert e adds */
                e = selected[i];
                if ((uint32_t)e < (uint32_t)a.experts && e % 32 == lane)
                    w[e] += a.scale * gmm__safe_quotient(gmm__route_score(&a, t, e, m, z), divisor) *
                            (g[i] - weighted_sum);
            }
        }

        mean = 0.0f;
        if (!a.sigmoid) {
            for (e = lane; e < a.experts; e += 32) mean += w[e];
            mean = gmm__warp_sum(mean);
        }
        for (e = lane; e < a.experts; e += 32) {
            float one_minus_s = 0.0f, d;
            /* 1 - s without cancellation */
            if (a.sigmoid) (void)gmm_sigmoid_rest(gmm__route_load(&a.logits, t, e), &one_minus_s);
            d = a.sigmoid ? w[e] * one_minus_s : w[e] - gmm__route_score(&a, t, e, m, z) * mean;
            if (a.z != 0.0f) d += z_scale * (m + logf(z)) * (gmm_exp(gmm__route_load(&a.logits, t, e) - m) / z);
            gmm__route_store(&a.dlogits, t, e, d);
        }
    }
}

/* A routing from slots to dense matrices, or back. One warp per token. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_dense(const __grid_constant__ gmm__dense_args a) {
    gmm_pdl_wait();
    const int64_t warps = blockDim.x / 32u, stride = (int64_t)gridDim.x * warps;
    const int32_t lane = gmm__lane();
    int64_t t;
    for (t = (int64_t)blockIdx.x * warps + gmm__warp(); t < a.tokens; t += stride) {
        int32_t *indices = a.indices + t * a.topk, e, i, count = 0;
        uint8_t *map = a.map ? a.map + t * a.experts : NULL;
        float *values = a.values ? a.values + t * a.experts : NULL;
        for (e = lane; a.to_dense && e < a.experts; e += 32) {
            float sum = 0.0f;
            uint8_t chosen = 0;
            for (i = 0; i < a.topk; i++) {
                if (indices[i] != e) continue;
                chosen = 1;
                if (values) sum += a.probs[t * a.topk + i];
            }
            if (map) map[e] = chosen;
            if (values) values[e] = sum;
        }
        if (a.to_dense) continue;
        for (e = lane; map && e - lane < a.experts && count < a.topk; e += 32) {
            const int32_t chosen = e < a.experts && map[e];
            const uint32_t all = __ballot_sync(0xFFFFFFFFu, chosen);
            i = count + __popc(all & ((1u << lane) - 1u));
            if (chosen && i < a.topk) {
                indices[i] = e;
                if (a.counts) atomicAdd(&a.counts[e], 1);
            }
            count += __popc(all);
        }
        for (i = count + lane; map && i < a.topk; i += 32) indices[i] = -1;
        __syncwarp();
        for (i = lane; values && i < a.topk; i += 32) {
            e = indices[i];
            a.probs[t * a.topk + i] = (uint32_t)e < (uint32_t)a.experts ? values[e] : 0.0f;
        }
    }
}

/* The update of expert biases; see gmm_expert_bias. One warp per layer. */
GMM__KERNEL __launch_bounds__(32, 1) gmm_route_bias(const __grid_constant__ gmm__bias_args a) {
    gmm_pdl_wait();
    int64_t *counts = a.total_counts + blockIdx.x * (int64_t)a.experts, sum = 0;
    float *bias = a.bias + blockIdx.x * (int64_t)a.experts;
    int32_t e;
    for (e = gmm__lane(); e < a.experts; e += 32) sum += counts[e];
    sum = __shfl_sync(0xFFFFFFFFu, gmm__warp_scan(sum), 31);
    for (e = gmm__lane(); e < a.experts; e += 32) {
        const int64_t above = counts[e] * a.experts; /* compared with the sum: no mean is rounded */
        bias[e] += above < sum ? a.rate : above > sum ? -a.rate : 0.0f;
        counts[e] = 0;
    }
}
#endif /* GMM__HOLDS(0) */

