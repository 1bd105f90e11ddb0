/* ................................................................................................ Gathered rows ... */

/* The index of a token matrix whose rows are gathered: row r of the product is row at[r] / div of the matrix; with a
   negative entry, or one past the matrix, a row of zeros. */
typedef struct gmm_row_index {
    const int32_t *at; /* [T]; NULL: rows are not gathered, and the functions below are not called */
    uint32_t *fault;   /* where GMM_FAULT_INDEX is set; NULL: it is not wanted */
    int32_t div, rows; /* divisor >= 1; rows of the matrix */
} gmm_row_index;

/* The row of the matrix that is row r of the product; -1: zeros. */
GMM__DEVICE int32_t gmm_indexed_row(const gmm_row_index *index, int64_t r) {
    int32_t row = index->at[r];
    if (index->div != 1 && row >= 0) row = (int32_t)((uint32_t)row / (uint32_t)index->div);
    return row >= 0 && row < index->rows ? row : -1;
}
/* The same, and an entry past the matrix is reported. */
GMM__DEVICE int32_t gmm_checked_row(const gmm_row_index *index, int64_t r) {
    const int32_t row = gmm_indexed_row(index, r);
    if (row < 0 && index->at[r] >= 0 && index->fault) atomicOr(index->fault, (uint32_t)GMM_FAULT_INDEX);
    return row;
}
/* Reports entries past the matrix among those of rows begin, begin + step, ... below `end`: the threads that share the
   rows of a call begin at different ones. */
GMM__DEVICE void gmm_report_index_faults(const gmm_row_index *index, int64_t begin, int64_t end, int64_t step) {
    const int64_t limit = (int64_t)index->rows * index->div;
    int past = 0;
    int64_t row;
    if (!index->fault) return;
    for (row = begin; row < end; row += step) past |= index->at[row] >= limit;
    if (past) atomicOr(index->fault, (uint32_t)GMM_FAULT_INDEX);
}

/* Copies the rows that an index names to a dense matrix in the workspace, for products that do not gather them. */
enum { GMM_GATHER_THREADS = 256, GMM_GATHER_PER_SM = 8 }; /* threads of a CTA; CTAs of a multiprocessor */
typedef struct gmm_gather_args {
    const char *src;
    char *dst;           /* 16-byte aligned */
    int64_t ld, pitch;   /* bytes from row to row of src and dst; pitch is a multiple of 16 */
    int64_t bytes;       /* of a row, an even number */
    gmm_row_index index;
    gmm_groups groups;   /* splits in device memory: rows behind the last group are not copied */
} gmm_gather_args;

#if GMM__HOLDS(0)
/* One warp per row. */
GMM__KERNEL __launch_bounds__(GMM_GATHER_THREADS) gmm_gather_rows(const __grid_constant__ gmm_gather_args args) {
    gmm_pdl_wait();
    const int64_t warps = (int64_t)gridDim.x * (GMM_GATHER_THREADS / 32), rows = gmm_split_rows(&args.groups);
    const int64_t thread = (int64_t)blockIdx.x * GMM_GATHER_THREADS + threadIdx.x;
    const int64_t vectors = (((uint64_t)(uintptr_t)args.src | (uint64_t)args.ld) & 15) == 0 ? args.bytes / 16 : 0;
    const int lane = (int)threadIdx.x & 31;
    int64_t r, x;
    gmm_report_index_faults(&args.index, thread, rows, warps * 32);
    for (r = thread / 32; r < rows; r += warps) {
        const int32_t row = gmm_indexed_row(&args.index, r);
        const char *const from = args.src + (row < 0 ? 0 : row * args.ld);
        char *const to = args.dst + r * args.pitch;
#pragma unroll 4
        for (x = lane; x < vectors; x += 32)
            ((uint4 *)to)[x] = row < 0 ? make_uint4(0, 0, 0, 0) : ((const uint4 *)from)[x];
        for (x = 8 * vectors + lane; x < args.bytes / 2; x += 32)
            ((uint16_t *)to)[x] = row < 0 ? (uint16_t)0 : ((const uint16_t *)from)[x];
    }
}

static GMM__UNUSED cudaError_t gmm_launch_gather(int32_t grid, int pdl, const gmm_gather_args *args,
                                                 cudaStream_t stream) {
    return gmm_launch_pdl((const void *)gmm_gather_rows, pdl, (unsigned)grid, GMM_GATHER_THREADS, 0,
                          GMM__SM_KIB(GMM_GATHER_PER_SM, 0), args, stream);
}
#endif /* GMM__HOLDS(0) */
