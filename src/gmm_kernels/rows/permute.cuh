/* ............................................................................................. Permutation maps ... */

#if GMM__HOLDS(0)
/* counts[e][c] = slots of expert e in chunk c. One CTA per chunk. Integer atomics, so the order of additions does
   not matter. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_permute_count(const __grid_constant__ gmm__map_args a) {
    gmm_pdl_wait();
    extern __shared__ int32_t gmm__map_shared[];
    const int64_t chunks = (a.slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK;
    /* else counts are in device memory, and the launcher has zeroed them */
    const int shared = (int64_t)a.experts * 4 <= GMM__ELEM_SHARED;
    int64_t c;
    for (c = blockIdx.x; c < chunks; c += gridDim.x) {
        int32_t e, i;
        if (shared) {
            for (e = (int32_t)threadIdx.x; e < a.experts; e += GMM__ELEM_BLOCK) gmm__map_shared[e] = 0;
            __syncthreads();
        }
        for (i = (int32_t)threadIdx.x; i < GMM__MAP_CHUNK; i += GMM__ELEM_BLOCK) {
            const int64_t slot = c * GMM__MAP_CHUNK + i;
            if (slot >= a.slots) break;
            e = a.indices[slot];
            if (e >= 0 && e < a.experts) atomicAdd(shared ? &gmm__map_shared[e] : &a.counts[e * chunks + c], 1);
            else if (e != -1) gmm__fault(a.fault, (uint32_t)GMM_FAULT_INDEX);
        }
        if (shared) {
            __syncthreads();
            for (e = (int32_t)threadIdx.x; e < a.experts; e += GMM__ELEM_BLOCK)
                a.counts[e * chunks + c] = gmm__map_shared[e];
            __syncthreads();
        }
    }
}

/* Exclusive prefix sums of each expert's counts over the chunks, in place; starts[e] receives the total. One warp
   per expert. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_permute_scan(const __grid_constant__ gmm__map_args a) {
    gmm_pdl_wait();
    const int64_t chunks = (a.slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK;
    int64_t e;
    for (e = (int64_t)blockIdx.x * GMM__ELEM_WARPS + gmm__warp(); e < a.experts;
         e += (int64_t)gridDim.x * GMM__ELEM_WARPS) {
        int32_t *counts = a.counts + e * chunks;
        int64_t sum = 0, base;
        for (base = 0; base < chunks; base += 32) {
            const int64_t c = base + gmm__lane();
            const int32_t n = c < chunks ? counts[c] : 0;
            const int64_t end = sum + gmm__warp_scan(n);
            if (c < chunks) counts[c] = (int32_t)(end - n);
            sum = __shfl_sync(0xFFFFFFFFu, end, 31);
        }
        if (gmm__lane() == 0) a.starts[e] = sum;
    }
}

/* starts[e] = first row of expert e, sizes[e] = its rows with padding; reports a capacity fault. One warp. */
GMM__KERNEL __launch_bounds__(32, 1) gmm_permute_starts(const __grid_constant__ gmm__map_args a) {
    gmm_pdl_wait();
    int64_t begin = 0;
    int32_t base, overflow = 0;
    for (base = 0; base < a.experts; base += 32) {
        const int32_t e = base + gmm__lane();
        const int64_t n = e < a.experts ? a.starts[e] : 0, padded = (n + a.align - 1) / a.align * a.align;
        const int64_t end = begin + gmm__warp_scan(padded);
        const int64_t first = end - padded < a.capacity ? end - padded : a.capacity;
        const int64_t last = end < a.capacity ? end : a.capacity;
        if (e < a.experts) {
            a.starts[e] = first;
            if (a.sizes) a.sizes[e] = (int32_t)(last - first);
        }
        if (end > a.capacity) overflow = 1;
        begin = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    if (overflow) gmm__fault(a.fault, (uint32_t)GMM_FAULT_CAPACITY);
}

/* Assigns rows to slots. One warp (= CTA) per chunk ranks 32 slots at a time, in the order of slots: a slot's row is
   its expert's first row plus the number of earlier slots of that expert. */
GMM__KERNEL __launch_bounds__(32, 16) gmm_permute_assign(const __grid_constant__ gmm__map_args a) {
    gmm_pdl_wait();
    extern __shared__ int32_t gmm__map_shared[];
    const int64_t chunks = (a.slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK;
    const int shared = (int64_t)a.experts * 4 <= GMM__ELEM_SHARED;
    const int32_t lane = gmm__lane();
    int64_t c;
    for (c = blockIdx.x; c < chunks; c += gridDim.x) {
        int32_t *next = shared ? gmm__map_shared : a.counts + c; /* rank of the next slot of each expert */
        const int64_t stride = shared ? 1 : chunks;
        int32_t e, i;
        for (e = lane; shared && e < a.experts; e += 32) next[e] = a.counts[e * chunks + c];
        __syncwarp();
        for (i = lane; i < GMM__MAP_CHUNK; i += 32) {
            const int64_t slot = c * GMM__MAP_CHUNK + i;
            const int32_t expert = slot < a.slots ? a.indices[slot] : -1;
            const int valid = expert >= 0 && expert < a.experts;
            const uint32_t peers = __match_any_sync(0xFFFFFFFFu, valid ? expert : -1);
            const int32_t rank = __popc(peers & ((1u << lane) - 1u));
            const int32_t expert_rank = valid ? next[expert * stride] : 0;
            int64_t row = -1;
            __syncwarp();
            if (valid && rank == 0) next[expert * stride] = expert_rank + __popc(peers);
            __syncwarp();
            if (valid) row = a.starts[expert] + expert_rank + rank;
            if (row >= a.capacity) row = -1;
            if (slot < a.slots && a.row_of) a.row_of[slot] = (int32_t)row;
            if (row >= 0 && a.slot_of) a.slot_of[row] = (int32_t)slot;
        }
        __syncwarp();
    }
}

/* dprobs[slot] = gradient of the probability of the slot's row; dropped slots receive 0. One thread per slot. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 16) gmm_gather_probs(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t slots = a.tokens * a.topk, stride = (int64_t)gridDim.x * GMM__ELEM_BLOCK;
    int64_t i;
    for (i = (int64_t)blockIdx.x * GMM__ELEM_BLOCK + threadIdx.x; i < slots; i += stride) {
        const int32_t row = gmm__map_entry(a.row_of, i, a.capacity, a.fault);
        a.dprobs[i] = row >= 0 ? a.row_probs_in[row] : 0.0f;
    }
}

/* row_probs[r] = probability of the row's slot, 0 in padding. One thread per row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 16) gmm_gather_row_probs(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault), slots = a.tokens * a.topk;
    const int64_t rows = a.tail_zero ? a.capacity : valid_rows, stride = (int64_t)gridDim.x * GMM__ELEM_BLOCK;
    int64_t row;
    for (row = (int64_t)blockIdx.x * GMM__ELEM_BLOCK + threadIdx.x; row < rows; row += stride) {
        const int32_t slot = row < valid_rows ? gmm__map_entry(a.slot_of, row, slots, a.fault) : -1;
        a.row_probs[row] = slot >= 0 ? a.probs[slot] : 0.0f;
    }
}
#endif /* GMM__HOLDS(0) */

