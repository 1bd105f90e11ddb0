/* ................................................................................ Groups as cuBLASLt reads them ... */

/* cuBLASLt's grouped mode reads sizes, leading dimensions and addresses of its matrices from arrays in device memory.
   The kernel writes them from the row offsets of the groups. Its matrices are column-major: A, B and D stand for w, x
   and y in forward, w, dy and dx in dgrad, x, dy and dw in wgrad. D has m rows and n columns, k is the contraction. */
enum { GMM_LT_A, GMM_LT_B, GMM_LT_D, GMM_LT_MATRICES };
enum { GMM_LT_THREADS = 256, GMM_LT_PER_SM = 8 }; /* threads of a CTA; CTAs of a multiprocessor where D is zeroed */
/* The arrays, of [G] entries each: m, n, k and the leading dimensions are int32, the addresses void *. */
enum { GMM_LT_M, GMM_LT_N, GMM_LT_K, GMM_LT_LD, GMM_LT_ADDRESS = GMM_LT_LD + GMM_LT_MATRICES,
       GMM_LT_ARRAY_COUNT = GMM_LT_ADDRESS + GMM_LT_MATRICES };
typedef struct gmm_lt_args {
    const int64_t *offsets;           /* [G + 1] */
    gmm_kmat matrix[GMM_LT_MATRICES]; /* per group, or one matrix of tokens */
    void *array[GMM_LT_ARRAY_COUNT];
    float *scalars;                   /* [2]: 1 and beta */
    float beta;
    int32_t groups, wgrad;
    int32_t rows, cols; /* features that are m in all operations; n in wgrad, else k */
    int32_t zero;       /* 1: zeroes D where no group writes it: rows behind the last group; wgrad: of empty groups */
    int64_t capacity;
} gmm_lt_args;

#if GMM__HOLDS(0)
/* An empty group of wgrad has no columns, so that its D is zeroed here or keeps its bits. Leading dimensions are those
   of the operands in empty groups too: with 0 or 1 cuBLASLt 13.10 wrote wrong gradients beside them. */
GMM__KERNEL __launch_bounds__(GMM_LT_THREADS) gmm_lt_groups(const __grid_constant__ gmm_lt_args args) {
    const int32_t first = (int32_t)(blockIdx.x * GMM_LT_THREADS + threadIdx.x);
    int32_t g, i;
    for (g = first; g < args.groups; g += (int32_t)gridDim.x * GMM_LT_THREADS) {
        const int64_t begin = args.offsets[g];
        const int32_t tokens = (int32_t)(args.offsets[g + 1] - begin);
        ((int32_t *)args.array[GMM_LT_M])[g] = args.rows;
        ((int32_t *)args.array[GMM_LT_N])[g] = args.wgrad ? (tokens ? args.cols : 0) : tokens;
        ((int32_t *)args.array[GMM_LT_K])[g] = args.wgrad ? tokens : args.cols;
        for (i = 0; i < GMM_LT_MATRICES; i++) {
            const gmm_kmat *m = &args.matrix[i];
            const int of_tokens = args.wgrad ? i != GMM_LT_D : i != GMM_LT_A;
            ((int32_t *)args.array[GMM_LT_LD + i])[g] = (int32_t)m->ld;
            ((void **)args.array[GMM_LT_ADDRESS + i])[g] =
                gmm_kmat_data(m, g) + (of_tokens ? begin * m->ld * gmm_kmat_size(m) : 0);
        }
    }
    if (first == 0) {
        args.scalars[0] = 1.0f;
        args.scalars[1] = args.beta;
    }
    if (!args.zero) return;
    if (!args.wgrad)
        gmm_gemm_zero_tail(&args.matrix[GMM_LT_D], args.offsets[args.groups], args.capacity, args.rows);
    for (g = 0; args.wgrad && g < args.groups; g++) {
        gmm_kmat d = args.matrix[GMM_LT_D];
        if (args.offsets[g + 1] > args.offsets[g]) continue;
        d.data = gmm_kmat_data(&d, g);
        gmm_gemm_zero_tail(&d, 0, args.cols, args.rows);
    }
}

static GMM__UNUSED cudaError_t gmm_launch_lt_groups(int32_t grid, const gmm_lt_args *args, cudaStream_t stream) {
    return gmm_launch((const void *)gmm_lt_groups, dim3((unsigned)grid), GMM_LT_THREADS, 0, args, stream);
}
#endif /* GMM__HOLDS(0) */

