/* ................................................................................................... Tail of D ... */

/* Zeroes the rows of D behind the last group, for engines whose GEMM kernel does not do it. */
enum { GMM_TAIL_THREADS = 256 };
typedef struct gmm_tail_args {
    gmm_kmat d;        /* [capacity, n] */
    gmm_groups groups; /* splits in device memory */
    int32_t n;
} gmm_tail_args;

/* Number of rows in a split by the rule of gmm_split_end: the largest offset or the sum of the sizes, saturated at
   the capacity. One warp. */
GMM__DEVICE int64_t gmm_split_rows(const gmm_groups *s) {
    const int is_offsets = s->form == GMM_SPLIT_OFFSETS;
    const int64_t capacity = s->capacity;
    int64_t rows = 0, v;
    int32_t g;
    int step;
    for (g = (int32_t)(threadIdx.x & 31); g < s->count; g += 32) {
        v = gmm_split_value(s, (int64_t)g + is_offsets);
        v = v < 0 ? 0 : v > capacity ? capacity : v;
        rows = is_offsets ? (v > rows ? v : rows) : (v > capacity - rows ? capacity : v + rows);
    }
    for (step = 16; step > 0; step /= 2) {
        v = (int64_t)__shfl_xor_sync(0xFFFFFFFFu, (long long)rows, step);
        rows = is_offsets ? (v > rows ? v : rows) : (v > capacity - rows ? capacity : v + rows);
    }
    return rows;
}

#if GMM__HOLDS(0)
/* Zeroes rows [rows of the split, capacity) of D, one warp per row. */
GMM__KERNEL __launch_bounds__(GMM_TAIL_THREADS) gmm_linear_tail(const __grid_constant__ gmm_tail_args args) {
    gmm_pdl_wait();
    gmm_gemm_zero_tail(&args.d, gmm_split_rows(&args.groups), args.groups.capacity, args.n);
}

static GMM__UNUSED cudaError_t gmm_launch_tail(int32_t grid, int pdl, const gmm_tail_args *args, cudaStream_t stream) {
    return gmm_launch_pdl((const void *)gmm_linear_tail, pdl, (unsigned)grid, GMM_TAIL_THREADS, 0, GMM__SM_KIB(8, 0),
                          args, stream);
}
#endif /* GMM__HOLDS(0) */

