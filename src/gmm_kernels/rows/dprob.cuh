/* ................................................................................ dprob from its parts ... */

/* The gradient of the probabilities where a cast of dz or FC2's dgrad computes the activation's gradient. They write
   the parts of each row, sums over GMM_ACT_DOT_COLS columns. */
typedef struct gmm__dprob_args {
    const float *dots;         /* [parts][rows] */
    const int64_t *valid_rows; /* device memory */
    int64_t rows;
    int32_t ffn, tail_zero;
    float *dprob;              /* [rows]; with tail_zero zeros behind the valid ones */
} gmm__dprob_args;

#if GMM__HOLDS(0)
/* dprob of a row, added up in the order of gmm_act_bwd. */
GMM__DEVICE float gmm__dprob_of(const gmm__dprob_args *a, int64_t row) {
    const int32_t parts = (a->ffn + GMM_ACT_DOT_COLS - 1) / GMM_ACT_DOT_COLS;
    const int32_t warps = gmm__act_warps_per_row(a->ffn), per_span = GMM__ELEM_SPAN / GMM_ACT_DOT_COLS;
    float dprob = 0.0f;
    int32_t warp, part, q;
    for (warp = 0; warp < warps; warp++) {
        float sum[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        for (part = warp * per_span; part < parts; part += warps * per_span)
#pragma unroll
            for (q = 0; q < per_span; q++)
                if (part + q < parts) sum[q] = __fadd_rn(sum[q], a->dots[(part + q) * a->rows + row]);
        dprob = __fadd_rn(dprob, __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3])));
    }
    return dprob;
}
/* One thread per row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK) gmm_act_dprob(const __grid_constant__ gmm__dprob_args a) {
    int64_t row = (int64_t)blockIdx.x * GMM__ELEM_BLOCK + threadIdx.x;
    gmm_pdl_wait_only();
    for (; row < a.rows; row += (int64_t)gridDim.x * GMM__ELEM_BLOCK)
        if (row < *a.valid_rows) a.dprob[row] = gmm__dprob_of(&a, row);
        else if (a.tail_zero) a.dprob[row] = 0.0f;
}
#endif /* GMM__HOLDS(0) */
