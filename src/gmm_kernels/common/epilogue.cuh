/* Arguments of products, and the steps of their epilogue. */
/* D_g = p (alpha_g A_g B_g^T + bias_g s) + beta_g D_g for all groups g of one call. Groups are ranges of rows of the
   token matrices: fwd and dgrad are m-grouped (rows of A and D), wgrad is k-grouped (the contraction).
       fwd    A = x  [T, K]        B = w [N, K]                D = y  [T, N]
       dgrad  A = dy [T, N]        B = w [N, K], as B[k][n]    D = dx [T, K]
       wgrad  A = dy, as A[k][m]   B = x, as B[k][n]           D = dw [N, K] */
typedef struct gmm_gemm_args {
    gmm_kmat a, b, d, bias;
    const int64_t *offsets; /* [G + 1] */
    const int32_t *tiles;   /* [G + 1] prefix sums of the groups' tiles of rows: fwd, dgrad, quantized wgrad */
    int32_t groups;
    int32_t m, n, k;        /* extents; the grouped one is not read */
    int64_t capacity;
    const float *alpha;     /* [G] or [1]; NULL: 1 */
    int32_t alpha_per_group;
    int32_t zero_tail;      /* fwd, dgrad: rows of D behind the last group become 0 */
    const float *bias_scale; /* [T] s, what the bias is multiplied by; NULL: 1 */
    const float *prob;      /* [T] p, what rows of the sum are multiplied by; NULL: 1 */
    const float *beta;      /* [G]; NULL = beta_all */
    const uint8_t *frozen;  /* [G]; NULL: no group is frozen */
    float beta_all;
} gmm_gemm_args;

/* Epilogue steps of products in forward and dgrad: what happens to an fp32 sum between the mainloop and the addition of
   beta D, which is followed by the only rounding. Every engine applies the steps in the order of the list. A step is
   element-wise: it computes an element from the sum so far, a value of its row and a value of its column. */

/* Steps: X(name, whether it reads a value per row, whether it reads a value per column). Each of them has
   gmm_epilogue_<name>_present, which is the same for all threads; gmm_epilogue_<name>_values, which says where its
   values are, is called for absent steps too, and reads no memory but a table that is present; and gmm_epilogue_<name>,
   the arithmetic of one element. A value that a call does not have is 1. */
#define GMM_EPILOGUE_STEP_LIST(X) \
    X(bias, 1, 1) \
    X(prob, 1, 0)

#define GMM__X(name, rows, cols) GMM_EPILOGUE_##name,
typedef enum gmm_epilogue_step { GMM_EPILOGUE_STEP_LIST(GMM__X) gmm_epilogue_steps } gmm_epilogue_step;
#undef GMM__X

/* Values of rows and columns of D. NULL: 1. */
typedef struct gmm_epilogue_values {
    const float *rows; /* that of row `row` of the token matrices, which the caller passes, and those behind it */
    const char *cols;  /* that of column 0, and those behind it */
    gmm_dtype cols_dtype;
} gmm_epilogue_values;

/* The bias, times bias_scale of the row. */
GMM__DEVICE int gmm_epilogue_bias_present(const gmm_gemm_args *args) { return args->bias.dtype != GMM_NONE; }
GMM__DEVICE gmm_epilogue_values gmm_epilogue_bias_values(const gmm_gemm_args *args, int32_t g, int64_t row) {
    gmm_epilogue_values values;
    values.rows = args->bias_scale ? args->bias_scale + row : NULL;
    values.cols = gmm_kmat_data(&args->bias, g);
    values.cols_dtype = args->bias.dtype;
    return values;
}
GMM__DEVICE float gmm_epilogue_bias(float sum, float row, float col) { return __fmaf_rn(col, row, sum); }

/* Rows times their probabilities. */
GMM__DEVICE int gmm_epilogue_prob_present(const gmm_gemm_args *args) { return args->prob != NULL; }
GMM__DEVICE gmm_epilogue_values gmm_epilogue_prob_values(const gmm_gemm_args *args, int32_t g, int64_t row) {
    gmm_epilogue_values values;
    (void)g;
    values.rows = args->prob + row;
    values.cols = NULL;
    values.cols_dtype = GMM_NONE;
    return values;
}
GMM__DEVICE float gmm_epilogue_prob(float sum, float row, float col) {
    (void)col;
    return __fmul_rn(sum, row);
}

/* The functions of the step `step`, a constant. */
GMM__DEVICE int gmm_epilogue_reads_cols(const gmm_epilogue_step step) {
#define GMM__X(name, rows, cols) if (step == GMM_EPILOGUE_##name) return cols;
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return 0;
}
GMM__DEVICE int gmm_epilogue_present(const gmm_epilogue_step step, const gmm_gemm_args *args) {
#define GMM__X(name, rows, cols) if (step == GMM_EPILOGUE_##name) return gmm_epilogue_##name##_present(args);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return 0;
}
/* Whether the call has any. */
GMM__DEVICE int gmm_epilogue_steps_present(const gmm_gemm_args *args) {
#define GMM__X(name, rows, cols) if (gmm_epilogue_##name##_present(args)) return 1;
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return 0;
}
GMM__DEVICE gmm_epilogue_values gmm_epilogue_values_of(const gmm_epilogue_step step, const gmm_gemm_args *args,
                                                       int32_t g, int64_t row) {
#define GMM__X(name, rows, cols) if (step == GMM_EPILOGUE_##name) return gmm_epilogue_##name##_values(args, g, row);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return gmm_epilogue_bias_values(args, g, row);
}
GMM__DEVICE float gmm_epilogue_apply(const gmm_epilogue_step step, float sum, float row, float col) {
#define GMM__X(name, rows, cols) if (step == GMM_EPILOGUE_##name) return gmm_epilogue_##name(sum, row, col);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return sum;
}
