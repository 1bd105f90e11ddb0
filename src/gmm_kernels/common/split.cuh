/* ....................................................................................... Values from the host ... */

/* Writes up to GMM_COPY_VALUES words of 64 bits to device memory, one per thread of a CTA. The words are kernel
   parameters, of which 448 fit the limit of 4096 bytes: so the host array may change as soon as the launch returns, and
   a captured graph keeps the captured values. */
enum { GMM_COPY_VALUES = 448 };
typedef struct gmm_copy_args {
    uint64_t *dst;
    int32_t count;
    uint64_t values[GMM_COPY_VALUES];
} gmm_copy_args;

#if GMM__HOLDS(0)
GMM__KERNEL __launch_bounds__(GMM_COPY_VALUES) gmm_copy_values(const __grid_constant__ gmm_copy_args args) {
    const int i = (int)threadIdx.x;
    if (i < args.count) args.dst[i] = args.values[i];
}
#endif /* GMM__HOLDS(0) */

/* Sets words of 32 bits to one value. A memset would end a chain of programmatic launches. */
enum { GMM_FILL_THREADS = 1024, GMM_FILL_CTAS = 132 };
typedef struct gmm_fill_args {
    uint32_t *words;
    int64_t count;
    uint32_t value;
} gmm_fill_args;

#if GMM__HOLDS(0)
GMM__KERNEL __launch_bounds__(GMM_FILL_THREADS) gmm_fill_words(const __grid_constant__ gmm_fill_args args) {
    int64_t i;
    gmm_pdl_wait();
    for (i = (int64_t)blockIdx.x * GMM_FILL_THREADS + threadIdx.x; i < args.count;
         i += (int64_t)gridDim.x * GMM_FILL_THREADS)
        args.words[i] = args.value;
}
#endif /* GMM__HOLDS(0) */

/* ............................................................................................... Split offsets ... */

/* The split reader: row offsets and tile counts of the groups, from sizes or offsets in device memory. */
enum { GMM_OFFSETS_THREADS = 1024, GMM_OFFSETS_TILES = 2 };
typedef struct gmm_offsets_args {
    gmm_groups groups; /* splits in device memory */
    int64_t *offsets;  /* [G + 1] */
    int32_t *tiles[GMM_OFFSETS_TILES]; /* [G + 1] prefix sums of the groups' tiles of tile_rows rows each; NULL: none */
    int32_t tile_rows[GMM_OFFSETS_TILES];
} gmm_offsets_args;

/* Entry i of the split in device memory. */
GMM__DEVICE int64_t gmm_split_value(const gmm_groups *s, int64_t i) {
    return s->dtype == GMM_I64 ? ((const int64_t *)s->splits)[i] : ((const int32_t *)s->splits)[i];
}

/* Inclusive scan over the CTA of values >= 0: their sum, saturated at `limit`, or their maximum (`maximum`). *total
   receives the last value. `warps` is scratch memory of 32 words in shared memory. */
GMM__DEVICE int64_t gmm_block_scan(int64_t v, int maximum, int64_t limit, int64_t *warps, int64_t *total) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int step;
    int64_t prefix;
    for (step = 1; step < 32; step *= 2) {
        const int64_t other = (int64_t)__shfl_up_sync(0xFFFFFFFFu, (long long)v, (unsigned)step);
        if (lane >= step) v = maximum ? (v > other ? v : other) : (v > limit - other ? limit : v + other);
    }
    if (lane == 31) warps[warp] = v;
    __syncthreads();
    if (warp == 0) {
        int64_t warp_prefix = lane < (int)blockDim.x >> 5 ? warps[lane] : 0;
        for (step = 1; step < 32; step *= 2) {
            const int64_t other = (int64_t)__shfl_up_sync(0xFFFFFFFFu, (long long)warp_prefix, (unsigned)step);
            if (lane >= step)
                warp_prefix = maximum ? (warp_prefix > other ? warp_prefix : other)
                                      : (warp_prefix > limit - other ? limit : warp_prefix + other);
        }
        warps[lane] = warp_prefix;
    }
    __syncthreads();
    *total = warps[31];
    prefix = warp > 0 ? warps[warp - 1] : 0;
    __syncthreads();
    return maximum ? (v > prefix ? v : prefix) : (v > limit - prefix ? limit : v + prefix);
}

#if GMM__HOLDS(0)
/* Reads a split by the rule of gmm_split_end and writes row offsets and tile counts. The end of a group is a scan
   with saturation, because the rule clamps to [0, capacity]; gmm_split_end is then evaluated for every group in
   parallel and reports faults. One CTA of full warps. */
GMM__KERNEL __launch_bounds__(GMM_OFFSETS_THREADS) gmm_split_offsets(const __grid_constant__ gmm_offsets_args args) {
    __shared__ int64_t warps[32], ends[GMM_OFFSETS_THREADS + 1];
    const gmm_groups *s = &args.groups;
    const int64_t capacity = s->capacity;
    const int is_offsets = s->form == GMM_SPLIT_OFFSETS, tid = (int)threadIdx.x;
    int64_t rows = 0, tiles[GMM_OFFSETS_TILES] = { 0, 0 }, total;
    uint32_t fault = 0;
    int32_t first, k;
    gmm_pdl_wait();
    if (tid == 0) {
        args.offsets[0] = 0;
#pragma unroll
        for (k = 0; k < GMM_OFFSETS_TILES; k++)
            if (args.tiles[k]) args.tiles[k][0] = 0;
        if (is_offsets && gmm_split_value(s, 0) != 0)
            fault |= (uint32_t)GMM_FAULT_MONOTONIC;
    }
    for (first = 0; first < s->count; first += (int32_t)blockDim.x) {
        const int64_t g = (int64_t)first + tid;
        const int valid = g < s->count;
        int64_t value = 0, end, i = g + is_offsets;
        if (valid) value = gmm_split_value(s, i);
        end = value < 0 ? 0 : value > capacity ? capacity : value;
        if (tid == 0) /* the scan continues from the end of the previous chunk of groups */
            end = is_offsets ? (end > rows ? end : rows) : (end > capacity - rows ? capacity : end + rows);
        end = gmm_block_scan(end, is_offsets, capacity, warps, &total);
        ends[tid + 1] = end;
        if (tid == 0) ends[0] = rows;
        __syncthreads();
        if (valid) {
            end = gmm_split_end(ends[tid], value, s->form, capacity, s->row_align, &fault);
            args.offsets[g + 1] = end;
        }
#pragma unroll
        for (k = 0; k < GMM_OFFSETS_TILES; k++)
            if (args.tiles[k]) {
                int64_t count = valid ? (end - ends[tid] + args.tile_rows[k] - 1) / args.tile_rows[k] : 0, sum;
                count = gmm_block_scan(count, 0, INT64_MAX, warps, &sum);
                if (valid) args.tiles[k][g + 1] = (int32_t)(tiles[k] + count);
                tiles[k] += sum;
            }
        rows = total;
        __syncthreads();
    }
    if (fault && s->fault) atomicOr(s->fault, fault);
}
#endif /* GMM__HOLDS(0) */

/* The same for at most 32 groups: each warp that needs the split reads it, so that no kernel has to run before. Lane g
   receives the first row and the number of rows of group g, and the inclusive prefix sum of tiles. The warp with
   `report_faults` reports faults. */
typedef struct gmm_warp_split { int32_t begin, rows, tiles, total; } gmm_warp_split;
GMM__DEVICE gmm_warp_split gmm_warp_split_scan(const gmm_groups *s, int32_t tile_rows, int32_t report_faults) {
    const int32_t lane = (int32_t)(threadIdx.x & 31u), is_offsets = s->form == GMM_SPLIT_OFFSETS;
    const int32_t capacity = (int32_t)s->capacity, valid = lane < s->count;
    const int64_t value = valid ? gmm_split_value(s, lane + is_offsets) : 0;
    int32_t end = value < 0 ? 0 : value > capacity ? capacity : (int32_t)value, step;
    gmm_warp_split split;
    for (step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, end, (unsigned)step);
        const int32_t sum = end > capacity - other ? capacity : end + other;
        if (lane >= step) end = !is_offsets ? sum : end > other ? end : other;
    }
    split.begin = __shfl_up_sync(0xFFFFFFFFu, end, 1u);
    if (lane == 0) split.begin = 0;
    split.rows = end - split.begin;
    split.tiles = (split.rows + tile_rows - 1) / tile_rows;
    for (step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, split.tiles, (unsigned)step);
        if (lane >= step) split.tiles += other;
    }
    split.total = __shfl_sync(0xFFFFFFFFu, split.tiles, 31);
    if (report_faults && s->fault) {
        uint32_t fault = 0;
        if (valid) (void)gmm_split_end(split.begin, value, s->form, capacity, s->row_align, &fault);
        if (lane == 0 && is_offsets && gmm_split_value(s, 0) != 0) fault |= (uint32_t)GMM_FAULT_MONOTONIC;
        if (fault) atomicOr(s->fault, fault);
    }
    return split;
}

