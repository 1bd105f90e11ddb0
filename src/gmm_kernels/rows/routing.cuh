/* ...................................................................................................... Routing ... */

#if GMM__HOLDS(0)
/* Sort key of a score, as wide as it: larger scores have larger keys, and NaN has the least. No score has the key 0. */
GMM__DEVICE uint32_t gmm__score_key(float v) {
    const uint32_t u = gmm_f32_bits(v);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? 1u : u & 0x80000000u ? ~u : u | 0x80000000u;
}
GMM__DEVICE float gmm__key_score(uint32_t key) {
    return gmm_f32_from_bits(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}
/* Sort key of a score and its index: larger scores first, then lower indices; NaN is behind all numbers. */
GMM__DEVICE uint64_t gmm__sort_key(float v, int32_t e) {
    return (uint64_t)gmm__score_key(v) << 32 | (0xFFFFFFFFu - (uint32_t)e);
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

/* part / sum, or 0 where the scores are so small that their sum underflows to 0 in fp32. */
GMM__DEVICE float gmm__safe_quotient(float part, float sum) { return sum == 0.0f ? 0.0f : part / sum; }

/* Arrays of a warp have a whole number of rows of 32 experts, one for each lane. */
GMM__HD int32_t gmm__route_rows(int32_t experts) { return experts / 32 + (experts % 32 != 0); }

/* Reads the logits of a token into x, with -infinity behind the last. Returns the lane's largest. */
GMM__DEVICE float gmm__route_read_row(const gmm__view *m, int64_t t, int32_t experts, float *x) {
    const int32_t lane = gmm__lane(), rows = experts / 32;
    float largest = gmm_f32_from_bits(0xFF800000u), v;
    int32_t i;
#pragma unroll 4
    for (i = 0; i < rows; i++) {
        v = gmm__route_load(m, t, 32 * i + lane);
        x[32 * i + lane] = v;
        largest = fmaxf(largest, v);
    }
    if (experts % 32) {
        v = lane < experts % 32 ? gmm__route_load(m, t, 32 * rows + lane) : gmm_f32_from_bits(0xFF800000u);
        x[32 * rows + lane] = v;
        largest = fmaxf(largest, v);
    }
    return largest;
}
GMM__DEVICE void gmm__route_write_row(const gmm__view *m, int64_t t, int32_t experts, const float *x) {
    const int32_t lane = gmm__lane(), rows = experts / 32;
    int32_t i;
#pragma unroll 4
    for (i = 0; i < rows; i++) gmm__route_store(m, t, 32 * i + lane, x[32 * i + lane]);
    if (lane < experts % 32) gmm__route_store(m, t, 32 * rows + lane, x[32 * rows + lane]);
}
/* gmm__route_read_row and gmm__route_write_row with a constant dtype: the assignments let the compiler make a loop per
   dtype, which does not test it per element. Logits have one of these four dtypes. */
GMM__DEVICE float gmm__route_read(const gmm__route_args *a, int64_t t, float *x) {
    gmm__view m = a->logits;
    switch (m.dtype) {
    case GMM_F64: m.dtype = GMM_F64; return gmm__route_read_row(&m, t, a->experts, x);
    case GMM_F32: m.dtype = GMM_F32; return gmm__route_read_row(&m, t, a->experts, x);
    case GMM_F16: m.dtype = GMM_F16; return gmm__route_read_row(&m, t, a->experts, x);
    default: m.dtype = GMM_BF16; return gmm__route_read_row(&m, t, a->experts, x);
    }
}
GMM__DEVICE void gmm__route_write(const gmm__route_args *a, int64_t t, const float *x) {
    gmm__view m = a->dlogits;
    switch (m.dtype) {
    case GMM_F64: m.dtype = GMM_F64; gmm__route_write_row(&m, t, a->experts, x); break;
    case GMM_F32: m.dtype = GMM_F32; gmm__route_write_row(&m, t, a->experts, x); break;
    case GMM_F16: m.dtype = GMM_F16; gmm__route_write_row(&m, t, a->experts, x); break;
    default: m.dtype = GMM_BF16; gmm__route_write_row(&m, t, a->experts, x); break;
    }
}

/* gmm__route_softmax of logits that gmm__route_read has read; `largest` has the lane's largest before. The logits
   become their exponentials, unless scores are sigmoids. */
GMM__DEVICE void gmm__route_exponentials(const gmm__route_args *a, float *x, float *largest, float *sum) {
    const float m = gmm__key_score(__reduce_max_sync(0xFFFFFFFFu, gmm__score_key(*largest)));
    const int32_t rows = gmm__route_rows(a->experts), lane = gmm__lane();
    float z = 0.0f;
    int32_t i;
#pragma unroll 4
    for (i = 0; i < rows; i++) {
        const float v = gmm_exp(x[32 * i + lane] - m);
        if (!a->sigmoid) x[32 * i + lane] = v;
        z += v;
    }
    *largest = m;
    *sum = gmm__warp_sum(z);
}

/* Floats of a warp's arrays in gmm_route_topk: scores, sort keys, the sums of groups and, with losses, of a chunk's
   scores; and in gmm_route_gradient: scores, and their products with gradients. */
GMM__HD int64_t gmm__route_topk_floats(int32_t experts, int32_t groups, int32_t losses) {
    const int64_t rows = gmm__route_rows(experts);
    return (losses ? 64 : 32) * rows + GMM__ROUTE_PITCH * rows + (groups > 1 ? groups : 0);
}
GMM__HD int64_t gmm__route_gradient_floats(int32_t experts) { return 64 * (int64_t)gmm__route_rows(experts); }
/* A warp's array in `scratch`, where the CTA's arrays do not fit into shared memory. */
GMM__DEVICE float *gmm__route_scratch(const gmm__route_args *a, int64_t floats) {
    return a->scratch + ((int64_t)blockIdx.x * (blockDim.x / 32u) + gmm__warp()) * floats;
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

/* Where the value of an expert lies, and then its sort key. Neither the experts of a row nor those of a lane lie in the
   same bank of shared memory. */
GMM__DEVICE int32_t gmm__route_key_at(int32_t e) { return e + (e >> 5) * (GMM__ROUTE_PITCH - 32); }
/* The sum of the `count` largest values of n experts from `first` on, in falling order. One thread. */
GMM__DEVICE float gmm__route_group_sum(const float *value, int32_t first, int32_t n, int32_t count) {
    uint64_t previous_key = ~(uint64_t)0;
    float sum = 0.0f;
    int32_t e, i;
#pragma unroll 1
    for (i = 0; i < count; i++) {
        uint64_t max_key = 0;
#pragma unroll 1
        for (e = 0; e < n; e++) {
            const uint64_t key = gmm__sort_key(value[gmm__route_key_at(first + e)], e);
            if (key < previous_key && key > max_key) max_key = key;
        }
        previous_key = max_key;
        sum += value[gmm__route_key_at(first + (int32_t)(0xFFFFFFFFu - (uint32_t)max_key))];
    }
    return sum;
}
/* Chooses the group_topk groups of a token by the values of its experts. Writes the groups' sums, and returns the key
   of the last group that is chosen. */
GMM__DEVICE uint64_t gmm__route_choose_groups(const gmm__route_args *a, const float *value, float *sums) {
    const int32_t members = a->experts / a->groups;
    uint64_t last_key = ~(uint64_t)0;
    int32_t g, i;
    __syncwarp();
#pragma unroll 1
    for (g = gmm__lane(); g < a->groups; g += 32)
        sums[g] = gmm__route_group_sum(value, g * members, members, a->group_sum);
#pragma unroll 1
    for (i = 0; i < a->group_topk; i++) {
        uint64_t max_key = 0;
#pragma unroll 1
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
    extern __shared__ float gmm__route_shared[];
    float *x = a.scratch ? gmm__route_scratch(&a, a.experts) : gmm__route_shared + gmm__warp() * a.experts;
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

/* The update of expert biases; see gmm_expert_bias. A warp updates one layer at a time. */
GMM__KERNEL __launch_bounds__(32, 1) gmm_route_bias(const __grid_constant__ gmm__bias_args a) {
    int64_t layer;
    gmm_pdl_wait();
    for (layer = blockIdx.x; layer < a.layers; layer += gridDim.x) {
        int64_t *counts = a.total_counts + layer * a.experts, sum = 0;
        float *bias = a.bias + layer * a.experts;
        int32_t e;
        for (e = gmm__lane(); e < a.experts; e += 32) sum += counts[e];
        sum = __shfl_sync(0xFFFFFFFFu, gmm__warp_scan(sum), 31);
        for (e = gmm__lane(); e < a.experts; e += 32) {
            const int64_t above = counts[e] * a.experts; /* compared with the sum: no mean is rounded */
            bias[e] += above < sum ? a.rate : above > sum ? -a.rate : 0.0f;
            counts[e] = 0;
        }
    }
}
#endif /* GMM__HOLDS(0) */

