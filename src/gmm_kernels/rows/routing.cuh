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

/* Largest logit of a token, and the sum of exp(logit - largest). */
GMM__DEVICE void gmm__route_softmax(const gmm__route_args *a, int64_t t, float *largest, float *sum) {
    float m = gmm_f32_from_bits(0xFF800000u), z = 0.0f;
    int32_t e;
    for (e = gmm__lane(); e < a->experts; e += 32) m = fmaxf(m, gmm__load_f32(&a->logits, t, e));
    m = gmm__warp_max(m);
    for (e = gmm__lane(); e < a->experts; e += 32) z += gmm_exp(gmm__load_f32(&a->logits, t, e) - m);
    *largest = m;
    *sum = gmm__warp_sum(z);
}

GMM__DEVICE float gmm__route_score(const gmm__route_args *a, int64_t t, int32_t e, float largest, float sum) {
    const float l = gmm__load_f32(&a->logits, t, e);
    return a->sigmoid ? gmm_sigmoid(l) : gmm_exp(l - largest) / sum;
}

/* part / sum, or 0 where the scores are so small that their sum underflows to 0 in fp32. */
GMM__DEVICE float gmm__safe_quotient(float part, float sum) { return sum == 0.0f ? 0.0f : part / sum; }

/* A warp's array of `experts` floats: in shared memory, or in `scratch` where it does not fit. */
GMM__DEVICE float *gmm__route_array(const gmm__route_args *a) {
    extern __shared__ float gmm__route_shared[];
    const int64_t warps = blockDim.x / 32u;
    return a->scratch ? a->scratch + ((int64_t)blockIdx.x * warps + gmm__warp()) * a->experts
                      : gmm__route_shared + (int64_t)gmm__warp() * a->experts;
}

/* Selects the topk experts of each token and writes their indices and probabilities. One warp per token or, with
   losses, per chunk of GMM__ROUTE_CHUNK tokens, whose loss terms the warp adds up in order. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_topk(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int64_t warps = blockDim.x / 32u, stride = (int64_t)gridDim.x * warps;
    const int64_t chunk = a.sums ? GMM__ROUTE_CHUNK : 1, chunks = (a.tokens + chunk - 1) / chunk;
    const int32_t lane = gmm__lane();
    float *value = gmm__route_array(&a);
    int64_t c;
    for (c = (int64_t)blockIdx.x * warps + gmm__warp(); c < chunks; c += stride) {
        const int64_t last_token = (c + 1) * chunk < a.tokens ? (c + 1) * chunk : a.tokens;
        float *sums = a.sums ? a.sums + c * (a.experts + 1) : NULL, z_sum = 0.0f;
        int64_t t;
        for (t = c * chunk; t < last_token; t++) {
            float m = 0.0f, z = 1.0f, total = 1.0f, selected_sum = 0.0f, divisor = 1.0f;
            uint64_t previous_key = ~(uint64_t)0;
            int32_t e, i;
            if (!a.sigmoid || (sums && a.z_loss)) gmm__route_softmax(&a, t, &m, &z);
            if (sums && a.sigmoid) {
                total = 0.0f;
                for (e = lane; e < a.experts; e += 32) total += gmm__route_score(&a, t, e, m, z);
                total = gmm__warp_sum(total);
            }
            for (e = lane; e < a.experts; e += 32) {
                const float s = gmm__route_score(&a, t, e, m, z);
                const float normalized = a.sigmoid ? gmm__safe_quotient(s, total) : s;
                value[e] = a.expert_bias ? s + a.expert_bias[e] : s;
                if (sums) /* the same lane always updates expert e */
                    sums[e] = t == c * chunk ? normalized : sums[e] + normalized;
            }
            if (sums && a.z_loss) z_sum += (m + logf(z)) * (m + logf(z));
            for (i = 0; i < a.topk; i++) {
                uint64_t max_key = 0;
                for (e = lane; e < a.experts; e += 32) {
                    const uint64_t key = gmm__sort_key(value[e], e);
                    if (key < previous_key && key > max_key) max_key = key;
                }
                previous_key = gmm__warp_max_key(max_key);
                if (lane == i % 32) a.indices[t * a.topk + i] = (int32_t)(0xFFFFFFFFu - (uint32_t)previous_key);
            }
            for (i = lane; i < a.topk; i += 32) { /* each lane reads the indices that it wrote */
                e = a.indices[t * a.topk + i];
                selected_sum += gmm__route_score(&a, t, e, m, z);
                if (a.counts) atomicAdd(&a.counts[e], 1);
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

/* Adds up partial sums, GMM__ROUTE_FOLD rows at a time: in [rows][cols] -> out [ceil(rows / GMM__ROUTE_FOLD)][cols].
   A CTA processes 32 columns of one fold; each warp adds a quarter of the rows. */
typedef struct gmm__fold_args {
    const float *in;
    float *out;
    int64_t rows, cols;
} gmm__fold_args;

GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_fold(const __grid_constant__ gmm__fold_args a) {
    gmm_pdl_wait();
    __shared__ float part[GMM__ELEM_WARPS][32];
    const int64_t tiles = (a.cols + 31) / 32, folds = (a.rows + GMM__ROUTE_FOLD - 1) / GMM__ROUTE_FOLD;
    int64_t i;
    for (i = blockIdx.x; i < tiles * folds; i += gridDim.x) {
        const int64_t fold = i / tiles, col = (i - fold * tiles) * 32 + gmm__lane();
        const int64_t first = fold * GMM__ROUTE_FOLD + gmm__warp() * (GMM__ROUTE_FOLD / GMM__ELEM_WARPS);
        float sum = 0.0f;
        int32_t k;
#pragma unroll
        for (k = 0; k < GMM__ROUTE_FOLD / GMM__ELEM_WARPS; k++)
            if (col < a.cols && first + k < a.rows) sum += a.in[(first + k) * a.cols + col];
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
    int64_t begin = 0;
    float sum = 0.0f;
    if (a.offsets && lane == 0) a.offsets[0] = 0;
    for (base = 0; a.offsets && base < a.experts; base += 32) {
        const int32_t e = base + lane;
        const int64_t end = begin + gmm__warp_scan(e < a.experts ? a.counts[e] : 0);
        if (e < a.experts) a.offsets[e + 1] = (int32_t)end;
        begin = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    if (a.aux_loss) {
        for (base = lane; a.sums && base < a.experts; base += 32)
            sum += (float)a.counts[base] * a.sums[base];
        sum = gmm__warp_sum(sum);
        if (lane == 0) a.aux_loss[0] = a.aux != 0.0f ? a.aux * sum : 0.0f;
    }
    if (a.z_loss && lane == 0) a.z_loss[0] = a.sums && a.z != 0.0f ? a.z * a.sums[a.experts] : 0.0f;
}

/* dlogits of each token from the gradients of probabilities and losses. One warp per token. w[e] is the score times
   its gradient: every score in a denominator then meets a score in a numerator, which avoids quotients of two small
   numbers. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_gradient(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int64_t warps = blockDim.x / 32u, stride = (int64_t)gridDim.x * warps;
    const int32_t lane = gmm__lane();
    const float aux = a.aux != 0.0f ? (a.dloss ? a.dloss[0] : 1.0f) * a.aux : 0.0f;
    const float z_scale = a.z != 0.0f ? (a.dloss ? a.dloss[1] : 1.0f) * 2.0f * a.z : 0.0f;
    float *w = gmm__route_array(&a);
    int64_t t;
    for (t = (int64_t)blockIdx.x * warps + gmm__warp(); t < a.tokens; t += stride) {
        float m = 0.0f, z = 1.0f, total = 1.0f, mean = 0.0f;
        int32_t e, i;
        if (!a.sigmoid || a.z != 0.0f) gmm__route_softmax(&a, t, &m, &z);

        /* auxiliary loss: q_e, the normalised score, has the gradient aux c_e */
        if (a.aux != 0.0f && a.sigmoid) {
            float sum = 0.0f;
            for (e = lane; e < a.experts; e += 32) sum += gmm__route_score(&a, t, e, m, z);
            total = gmm__warp_sum(sum);
            for (e = lane; e < a.experts; e += 32)
                mean += aux * (float)a.counts[e] * gmm__safe_quotient(gmm__route_score(&a, t, e, m, z), total);
            mean = gmm__warp_sum(mean);
        }
        for (e = lane; e < a.experts; e += 32)
            w[e] = a.aux == 0.0f ? 0.0f : gmm__safe_quotient(gmm__route_score(&a, t, e, m, z), total) *
                                              (aux * (float)a.counts[e] - mean);

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
            if (a.sigmoid) (void)gmm_sigmoid_rest(gmm__load_f32(&a.logits, t, e), &one_minus_s);
            d = a.sigmoid ? w[e] * one_minus_s : w[e] - gmm__route_score(&a, t, e, m, z) * mean;
            if (a.z != 0.0f) d += z_scale * (m + logf(z)) * (gmm_exp(gmm__load_f32(&a.logits, t, e) - m) / z);
            gmm__store_f32(&a.dlogits, t, e, d);
        }
    }
}
#endif /* GMM__HOLDS(0) */

