#if GMM__HOLDS(0)
/* A slot of a token as the gradient sees it: its expert e, the expert's score s, and the gradient g of its probability.
   Behind the last slot, and where the index is out of range, e is -1, s is -0 and g is 0: -0 changes no sum. */
typedef struct gmm__route_slot {
    int32_t e;
    float s, g;
} gmm__route_slot;

GMM__DEVICE gmm__route_slot gmm__route_slot_at(const gmm__route_args *a, int64_t t, int32_t i, const float *x) {
    gmm__route_slot slot;
    slot.e = i < a->topk ? a->indices[t * a->topk + i] : -1;
    if ((uint32_t)slot.e >= (uint32_t)a->experts) slot.e = -1;
    slot.s = slot.e < 0 ? -0.0f : a->sigmoid ? gmm_sigmoid(x[slot.e]) : x[slot.e];
    slot.g = slot.e < 0 ? 0.0f : a->dprobs[t * a->topk + i];
    return slot;
}

/* Adds to w[e] the terms of probabilities, scale s_i / D, where D is the sum over the selected scores if they are
   normalised, else 1. Lane i has slot i of each 32, and sums are in the order of slots. several:
   topk is above 32, so that slots are read again for each 32; a constant of each call, which makes two versions. */
GMM__DEVICE void gmm__route_slot_terms(const gmm__route_args *a, int64_t t, const float *x, float *w, int32_t several) {
    const int32_t lane = gmm__lane(), step = several ? 32 : a->topk;
    float divisor = 1.0f, weighted_sum = 0.0f;
    gmm__route_slot slot = gmm__route_slot_at(a, t, lane, x);
    int32_t base, i;
    if (a->normalize) {
        float sum = 0.0f;
#pragma unroll 1
        for (base = 0; base < a->topk; base += step) {
            if (several) slot = gmm__route_slot_at(a, t, base + lane, x);
#pragma unroll 4
            for (i = 0; i < min(a->topk - base, step); i++) sum += __shfl_sync(0xFFFFFFFFu, slot.s, i);
        }
        divisor = a->sigmoid ? sum + 1e-20f : sum;
#pragma unroll 1
        for (base = 0; base < a->topk; base += step) {
            float quotient;
            if (several) slot = gmm__route_slot_at(a, t, base + lane, x);
            quotient = slot.e < 0 ? -0.0f : gmm__safe_quotient(slot.s, divisor);
#pragma unroll 4
            for (i = 0; i < min(a->topk - base, step); i++)
                weighted_sum += __shfl_sync(0xFFFFFFFFu, slot.g, i) * __shfl_sync(0xFFFFFFFFu, quotient, i);
        }
    }
#pragma unroll 1
    for (base = 0; base < a->topk; base += step) {
        float part, difference;
        int32_t order;
        if (several) slot = gmm__route_slot_at(a, t, base + lane, x);
        part = a->scale * gmm__safe_quotient(slot.s, divisor);
        difference = slot.g - weighted_sum;
        /* lanes whose slots have the same expert add one after another, in the order of slots */
        order = __popc(__match_any_sync(0xFFFFFFFFu, slot.e) & ((1u << lane) - 1u));
        if (slot.e < 0) order = -1;
#pragma unroll 1
        for (i = 0; __any_sync(0xFFFFFFFFu, order >= i); i++) {
            if (order == i) w[slot.e] = __fmaf_rn(difference, part, w[slot.e]);
            __syncwarp();
        }
    }
}

/* Makes scores of exponentials, but leaves logits of sigmoids in x, and starts w with the terms of the auxiliary loss:
   q_e, the normalised score, has the gradient aux c_e. w is 0 behind the last expert. */
GMM__DEVICE void gmm__route_loss_terms(const gmm__route_args *a, const int32_t *counts, float aux, float z,
                                       float *x, float *w) {
    const int32_t rows = gmm__route_rows(a->experts), lane = gmm__lane();
    float total = 0.0f, mean = 0.0f;
    int32_t e, i;
    if (!a->sigmoid) {
#pragma unroll 4
        for (i = 0; i < rows; i++) {
            x[32 * i + lane] = x[32 * i + lane] / z;
            w[32 * i + lane] = 0.0f;
        }
    } else {
#pragma unroll 4
        for (i = 0; i < rows; i++) w[32 * i + lane] = 0.0f;
    }
    if (a->aux == 0.0f) return;
    if (!a->sigmoid) {
#pragma unroll 4
        for (e = lane; e < a->experts; e += 32) w[e] = x[e] * (aux * (float)counts[e]);
        return;
    }
#pragma unroll 1
    for (e = lane; e < a->experts; e += 32) total += gmm_sigmoid(x[e]);
    total = gmm__warp_sum(total);
#pragma unroll 1
    for (e = lane; e < a->experts; e += 32)
        mean += aux * (float)counts[e] * gmm__safe_quotient(gmm_sigmoid(x[e]), total);
    mean = gmm__warp_sum(mean);
#pragma unroll 1
    for (e = lane; e < a->experts; e += 32)
        w[e] = gmm__safe_quotient(gmm_sigmoid(x[e]), total) * (aux * (float)counts[e] - mean);
}

/* dlogits of a warp's tokens. w[e] is the score times its gradient: every score in a denominator then meets a score in
   a numerator, which avoids quotients of two small numbers. x[e] is the score, or the logit of a sigmoid. */
GMM__DEVICE void gmm__route_gradients(const gmm__route_args *a, float *x) {
    const int64_t warps = blockDim.x / 32u, stride = (int64_t)gridDim.x * warps;
    const int32_t lane = gmm__lane(), rows = gmm__route_rows(a->experts);
    const float z_scale = a->z != 0.0f ? (a->dloss ? a->dloss[1] : 1.0f) * 2.0f * gmm__route_z(a) : 0.0f;
    float *w = x + 32 * (int64_t)rows;
    int64_t t;
    for (t = (int64_t)blockIdx.x * warps + gmm__warp(); t < a->tokens; t += stride) {
        const int64_t sequence = gmm__route_sequence(a, t);
        const int32_t *counts = a->sequence_counts ? a->sequence_counts + sequence * a->experts : a->counts;
        const float aux = a->aux != 0.0f ? (a->dloss ? a->dloss[0] : 1.0f) * gmm__route_aux(a, sequence) : 0.0f;
        float m, z = 1.0f, mean = 0.0f;
        int32_t e, i;
        if (gmm__route_is_padding(a, t)) {
#pragma unroll 1
            for (e = lane; e < a->experts; e += 32) gmm__route_store(&a->dlogits, t, e, 0.0f);
            continue;
        }
        m = gmm__route_read(a, t, x);
        if (!a->sigmoid || a->z != 0.0f) gmm__route_exponentials(a, x, &m, &z);
        gmm__route_loss_terms(a, counts, aux, z, x, w);
        __syncwarp();
        if (a->dprobs && a->topk <= 32) gmm__route_slot_terms(a, t, x, w, 0);
        else if (a->dprobs) gmm__route_slot_terms(a, t, x, w, 1);
        if (a->sigmoid) {
#pragma unroll 1
            for (i = 0; i < rows; i++) {
                float one_minus_s; /* without cancellation */
                (void)gmm_sigmoid_rest(x[32 * i + lane], &one_minus_s);
                w[32 * i + lane] *= one_minus_s;
            }
        } else {
#pragma unroll 4
            for (i = 0; i < rows; i++) mean += w[32 * i + lane];
            mean = gmm__warp_sum(mean);
#pragma unroll 4
            for (i = 0; i < rows; i++) w[32 * i + lane] = w[32 * i + lane] - x[32 * i + lane] * mean;
        }
        if (a->z != 0.0f) {
            const float scale = z_scale * (m + logf(z));
#pragma unroll 1
            for (i = 0; i < rows; i++) {
                const float l = x[32 * i + lane];
                w[32 * i + lane] += scale * (a->sigmoid ? gmm_exp(l - m) / z : l);
            }
        }
        gmm__route_write(a, t, w);
    }
}

/* dlogits of each token from the gradients of probabilities and losses. One warp per token. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_gradient(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    extern __shared__ float gmm__route_shared[];
    gmm__route_gradients(&a, gmm__route_shared + gmm__warp() * (int32_t)gmm__route_gradient_floats(a.experts));
}
/* The same with the warps' arrays in `scratch`. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
    gmm_route_gradient_scratch(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    gmm__route_gradients(&a, gmm__route_scratch(&a, gmm__route_gradient_floats(a.experts)));
}
#endif /* GMM__HOLDS(0) */

