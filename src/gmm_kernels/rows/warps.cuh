/* ........................................................................................................ Warps ... */

/* Reductions over a warp; every lane receives the result. A butterfly, so the order of additions is fixed. */
GMM__DEVICE float gmm__warp_sum(float v) {
    int32_t d;
#pragma unroll
    for (d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
    return v;
}
/* The sum of the four sums of gmm__quarter_warp_sum. */
GMM__DEVICE float gmm__sum_of_quarters(float v) {
    v = __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFFu, v, 8));
    return __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFFu, v, 16));
}
GMM__DEVICE float gmm__warp_max(float v) { /* NaN is ignored */
    int32_t d;
#pragma unroll
    for (d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, d));
    return v;
}
GMM__DEVICE int64_t gmm__warp_scan(int64_t v) { /* inclusive */
    int32_t d;
#pragma unroll
    for (d = 1; d < 32; d <<= 1) {
        const int64_t other = __shfl_up_sync(0xFFFFFFFFu, v, (unsigned)d);
        if (gmm__lane() >= d) v += other;
    }
    return v;
}

/* Grid-stride loop over the tasks of a kernel: parts of rows, in order, assigned round robin to all warps of the
   grid. Launchers ensure that rows, parts and the tasks of one round fit 31 bits. */
typedef struct gmm__grid_loop { uint32_t row, part, parts, step; } gmm__grid_loop;

GMM__DEVICE void gmm__grid_loop_advance(gmm__grid_loop *w, uint32_t tasks) {
    const uint32_t part = w->part + tasks, rows = part / w->parts;
    w->row += rows;
    w->part = part - rows * w->parts;
}
/* A warp takes `tasks_per_warp` consecutive tasks in every round. */
GMM__DEVICE gmm__grid_loop gmm__grid_loop_begin(int64_t parts, uint32_t tasks_per_warp) {
    gmm__grid_loop w;
    w.row = w.part = 0;
    w.parts = (uint32_t)parts;
    w.step = gridDim.x * GMM__ELEM_WARPS * tasks_per_warp;
    gmm__grid_loop_advance(&w, (blockIdx.x * GMM__ELEM_WARPS + (uint32_t)gmm__warp()) * tasks_per_warp);
    return w;
}
GMM__DEVICE void gmm__grid_loop_next(gmm__grid_loop *w) { gmm__grid_loop_advance(w, w->step); }
/* The next task in order. */
GMM__DEVICE gmm__grid_loop gmm__grid_loop_successor(gmm__grid_loop w) {
    if (++w.part < w.parts) return w;
    w.part = 0;
    w.row++;
    return w;
}

GMM__DEVICE void gmm__fault(uint32_t *word, uint32_t bits) {
    if (word && bits) atomicOr(word, bits);
}

/* Number of used rows by the rule of gmm_split_end on expert sizes. The whole warp calls it. */
GMM__DEVICE int64_t gmm__valid_rows(const int32_t *sizes, int32_t experts, int64_t capacity, uint32_t *fault) {
    const int reports = blockIdx.x == 0 && gmm__warp() == 0; /* one warp reports faults */
    int64_t sum = 0;
    int32_t e;
    for (e = gmm__lane(); e < experts; e += 32) {
        if (sizes[e] > 0) sum += sizes[e];
        else if (reports && sizes[e] < 0) gmm__fault(fault, (uint32_t)GMM_FAULT_NEGATIVE);
    }
    sum = __shfl_sync(0xFFFFFFFFu, gmm__warp_scan(sum), 31);
    if (sum <= capacity) return sum;
    if (reports && gmm__lane() == 0) gmm__fault(fault, (uint32_t)GMM_FAULT_CAPACITY);
    return capacity;
}

/* Entry i of a map, or -1 where it is outside of [-1, limit). */
GMM__DEVICE int32_t gmm__map_entry(const int32_t *map, int64_t i, int64_t limit, uint32_t *fault) {
    const int32_t v = map[i];
    if (v >= 0 && v < limit) return v;
    if (v != -1) gmm__fault(fault, (uint32_t)GMM_FAULT_INDEX);
    return -1;
}

/* Row of slot i of a token, -1 beyond the last slot, and its probability. */
GMM__DEVICE int32_t gmm__slot_row(const gmm__permute_args *a, int64_t token, int32_t i, float *prob) {
    const int64_t slot = token * a->topk + i;
    *prob = 1.0f;
    if (i >= a->topk) return -1;
    if (a->probs) *prob = a->probs[slot];
    return gmm__map_entry(a->row_of, slot, a->capacity, a->fault);
}

/* First row of group g, with or without padding. */
GMM__DEVICE int64_t gmm__pad_start(const gmm__pad_args *a, int64_t g, int32_t padded) {
    return padded ? min(a->blocks[g] * a->align, a->capacity) : a->offsets[g];
}

/* The group that contains a row of dst: the last group that starts at or before the row. A 32-way search by the
   whole warp. */
GMM__DEVICE int64_t gmm__pad_group(const gmm__pad_args *a, int64_t row) {
    int64_t first = 0, n = a->groups;
    while (n > 1) {
        const int64_t step = (n + 31) / 32, i = gmm__lane() * step;
        const uint32_t starts = __ballot_sync(0xFFFFFFFFu, i < n && gmm__pad_start(a, first + i, a->pad) <= row);
        const int64_t skip = (int64_t)(__popc(starts) - 1) * step;
        first += skip;
        n = n - skip < step ? n - skip : step;
    }
    return first;
}

