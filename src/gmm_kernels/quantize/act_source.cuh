/* --- vectorized casts of an activation: the source h = p act(gate, linear) is computed from its inputs --- */

/* h is rounded to the dtype of its inputs, as the activation kernel stores it, so that a cast has the bits of a cast of
   the stored h. A lane computes its eight rows of the tile of vectors.cuh, keeps them in slots of its own in shared
   memory, and loads them from there as if they were the source. So the loop over rows need not be unrolled, which would
   repeat the code of all activations. */
enum { GMM_CAST_ACT_SLOTS = 8 * GMM__QUANT_THREADS * 16 }; /* bytes: eight elements per row and thread */
static_assert((int)GMM_CAST_ACT_SLOTS >= (int)GMM_CAST_FP8_CODES, "columnwise codes replace the activation's slots");

/* A row of the lane's inputs: gate and linear values, which may alternate, in memory format, and the probability. */
typedef struct gmm_cast_act_row {
    gmm__raw8 a, b;
    float prob;
} gmm_cast_act_row;

/* Loads row `row` of the inputs from the lane's gate column `col` on. Everything else is a kernel parameter, so that
   addresses take few registers. */
GMM__DEVICE void gmm_cast_act_load(const gmm__quant_args *a, int32_t row, int32_t col, gmm_cast_act_row *dst) {
    const uint16_t *src = (const uint16_t *)a->src.data + ((int64_t)row * (int32_t)a->src.ld + col);
    const uint4 v = __ldg((const uint4 *)(const void *)src);
    uint4 u = make_uint4(0u, 0u, 0u, 0u);
    if (a->act.gated) u = __ldg((const uint4 *)(const void *)(src + a->act.linear));
    dst->prob = a->act.prob ? a->act.prob[row] : 1.0f;
    dst->a.w[0] = v.x; dst->a.w[1] = v.y; dst->a.w[2] = v.z; dst->a.w[3] = v.w;
    dst->b.w[0] = u.x; dst->b.w[1] = u.y; dst->b.w[2] = u.z; dst->b.w[3] = u.w;
}
/* gmm_cast_load of the activation. A row is computed while its successor is loaded, and its registers take the row
   behind that one, or the last one again. The slots may be overwritten behind a barrier. */
GMM__DEVICE void gmm_cast_load_act(const gmm_cast_tile *t, uint8_t *slots, uint32_t x[8][8]) {
    const gmm__act_source *act = &t->a->act;
    const int32_t alternate = act->layout == GMM__GLU_PAIRS, rows = t->in_cols ? min(t->valid_rows, 8) : 0;
    const int32_t row = t->p.source_row + t->p.row + t->row0;
    const int32_t col = alternate ? 2 * (t->c0 + t->col0) : gmm__act_gate_column(t->c0 + t->col0, act->interleave);
    uint4 *own = (uint4 *)(void *)slots + threadIdx.x;
    gmm_cast_act_row next[2];
    int32_t i, j, k;
    if (rows > 0)
#pragma unroll
        for (j = 0; j < 2; j++) gmm_cast_act_load(t->a, row + min(j, rows - 1), col, &next[j]);
#pragma unroll 1
    for (i = 0; i < rows; i += 2) {
#pragma unroll
        for (j = 0; j < 2; j++) {
            const float p = next[j].prob;
            float gate[8], linear[8], h[8], d_gate[8], d_linear[8];
            uint32_t w[4];
            if (alternate) gmm__deinterleave(t->source, &next[j].a, &next[j].b);
#pragma unroll
            for (k = 0; k < 8; k++) {
                gate[k] = gmm__word_value(t->source, next[j].a.w, k);
                linear[k] = gmm__word_value(t->source, next[j].b.w, k);
            }
            gmm_cast_act_load(t->a, row + min(i + 2 + j, rows - 1), col, &next[j]);
            gmm__act_x8(act->kind, 0, act->coef, gate, linear, h, d_gate, d_linear);
#pragma unroll
            for (k = 0; k < 4; k++) w[k] = gmm_pack2(t->source, p * h[2 * k], p * h[2 * k + 1]);
            own[(i + j) * GMM__QUANT_THREADS] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
#pragma unroll
    for (i = 0; i < 8; i++) {
        const uint4 v = i < rows ? own[i * GMM__QUANT_THREADS] : make_uint4(0u, 0u, 0u, 0u);
        x[i][0] = v.x;
        x[i][1] = v.y;
        x[i][2] = v.z;
        x[i][3] = v.w;
    }
}
