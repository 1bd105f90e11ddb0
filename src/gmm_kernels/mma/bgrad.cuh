/* ......................................................................................... Bias gradient ... */

/* db_g[n] = sum over the group's rows of s[r] dy[r][n]. A strip of GMM_TILE rows, counted from the start of the group,
   has one partial sum per column. Its rows are added in runs of 8, one row after another; then two neighbouring runs
   each become one of 16 rows, two of these one of 32, and so on. db adds the partial sums in the order of the strips.
   The vectorized casts compute partial sums in the same order (gmm_cast_column_sums), so that the bits of db do not
   depend on which kernel did. d_bias_scale[r] = sum over n of dy[r][n] bias_g[n]. */
enum { GMM_BGRAD_COLS = 256, GMM_BGRAD_THREADS = 256 };
typedef struct gmm_bgrad_args {
    gmm_kmat dy, db, bias;  /* db, bias: [G][n]. db needs partials, and d_bias_scale bias; each may be absent */
    const int64_t *offsets; /* [G + 1] */
    const int32_t *tiles;   /* [G + 1] prefix sums of the groups' strips */
    float *partials;        /* [strips][n] partial sums; NULL: neither written nor read */
    int32_t has_partials;   /* 1: an earlier kernel on the stream has written them */
    int32_t groups, n;
    int64_t capacity;
    const float *bias_scale; /* NULL: ones */
    const float *beta;      /* [G]; NULL = beta_all */
    const uint8_t *frozen;  /* [G]; NULL: no group is frozen */
    float beta_all;
    int32_t d_bias_scale_add; /* 1: d_bias_scale is added to instead of stored */
    int32_t zero_tail;       /* 1: entries of d_bias_scale behind the last group become 0 */
    float *d_bias_scale;     /* NULL: not written */
    gmm_row_index dy_index;
} gmm_bgrad_args;

#if GMM__HOLDS(0)
#define GMM__BODY GMM__BODY_BGRAD
/* kernel of the partial sums, kernel of the rows, dtype of dy, gathered */
#define GMM__ROW (gmm_linear_bgrad_partials_bf16, gmm_linear_bgrad_rows_bf16, GMM_BF16, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_linear_bgrad_partials_gathered_bf16, gmm_linear_bgrad_rows_gathered_bf16, GMM_BF16, 1)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_linear_bgrad_partials_f16, gmm_linear_bgrad_rows_f16, GMM_F16, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_linear_bgrad_partials_gathered_f16, gmm_linear_bgrad_rows_gathered_f16, GMM_F16, 1)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_linear_bgrad_partials_f32, gmm_linear_bgrad_rows_f32, GMM_F32, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_linear_bgrad_partials_gathered_f32, gmm_linear_bgrad_rows_gathered_f32, GMM_F32, 1)
#include GMM_KERNELS_FILE
#undef GMM__BODY

/* db_g[n] = beta db_g[n] + sum over the partial sums of the group's strips. One thread per element; no access to
   frozen groups, nor to groups without rows whose beta is 1. */
GMM__KERNEL __launch_bounds__(GMM_BGRAD_THREADS) gmm_linear_bgrad_sum(const __grid_constant__ gmm_bgrad_args args) {
    const int64_t count = (int64_t)args.groups * args.n;
    int64_t i;
    gmm_pdl_wait();
    for (i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t g = i / args.n, n = i % args.n;
        const float beta = args.beta ? args.beta[g] : args.beta_all;
        const int32_t first = args.tiles[g], last = args.tiles[g + 1];
        char *dst;
        float sum[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        int32_t strip;
        if ((args.frozen && args.frozen[g]) || (first == last && beta == 1.0f)) continue;
        dst = gmm_kmat_data(&args.db, g);
#pragma unroll 8
        for (strip = first; strip < last; strip++)
            sum[0] = __fadd_rn(sum[0], args.partials[(int64_t)strip * args.n + n]);
        dst += n * gmm_kmat_size(&args.db);
        if (beta != 0.0f) {
            float old[4];
            gmm_read4(args.db.dtype, dst, 1, 0, old);
            sum[0] = __fmaf_rn(beta, old[0], sum[0]);
        }
        gmm_write4(args.db.dtype, dst, 1, 0, sum);
    }
}

/* Rows: dtypes of dy, consecutive and gathered rows. */
typedef struct gmm_bgrad_kernel {
    gmm_dtype dtype;
    int gathered;
    const void *partials, *rows;
} gmm_bgrad_kernel;

static const gmm_bgrad_kernel gmm_bgrad_kernels[] = {
#define GMM__X(dtype, gathered, tag) \
    { dtype, gathered, (const void *)GMM__CAT(gmm_linear_bgrad_partials_, tag), \
      (const void *)GMM__CAT(gmm_linear_bgrad_rows_, tag) },
    GMM__X(GMM_BF16, 0, bf16)
    GMM__X(GMM_BF16, 1, gathered_bf16)
    GMM__IF_F16(GMM__X(GMM_F16, 0, f16))
    GMM__IF_F16(GMM__X(GMM_F16, 1, gathered_f16))
    GMM__X(GMM_F32, 0, f32)
    GMM__X(GMM_F32, 1, gathered_f32)
#undef GMM__X
};
#endif /* GMM__HOLDS(0) */

