/* --- vectorized casts of an activation, h = p act(gate, linear), or of the gradient of its inputs, z --- */

/* h is rounded to the dtype of its inputs, as the activation kernel stores it, so that a cast has the bits of a cast of
   the stored h. A lane computes its eight rows of the tile of vectors.cuh, keeps them in slots of its own in shared
   memory, and loads them from there as if they were the source. So the loop over rows need not be unrolled, which would
   repeat the code of all activations. */
enum {
    GMM_CAST_ACT_SLOTS = 8 * GMM__QUANT_THREADS * 16,    /* bytes: eight elements per row and thread */
    GMM_CAST_GRADIENT_SLOTS = 2 * GMM_CAST_ACT_SLOTS     /* of the gradients of gate and linear inputs */
};
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
/* Loads the lane's rows from its slots; zeros behind the `rows` that exist, or if its columns do not exist. */
GMM__DEVICE void gmm_cast_load_slots(const uint4 *own, int32_t in_cols, int32_t rows, uint32_t x[8][8]) {
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) {
        const uint4 v = in_cols && i < rows ? own[i * GMM__QUANT_THREADS] : make_uint4(0u, 0u, 0u, 0u);
        x[i][0] = v.x;
        x[i][1] = v.y;
        x[i][2] = v.z;
        x[i][3] = v.w;
    }
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
    gmm_cast_load_slots(own, 1, rows, x);
}

/* The gradient of z is computed for a tile of 128 columns of h. It is a tile of gate columns and, if the activation is
   gated, a tile of linear columns: the 128 columns lie in one block of gate columns. As for h, values are rounded as
   the activation kernel stores them, and lie in slots of the lane: eight rows of the gradient of the gate columns, then
   eight rows of that of the linear columns. A quarter of a warp adds up a part of dprob. */

/* Where a lane is in the rows of z, dy and prob, and the values of its row. */
typedef struct gmm_cast_gradient_row {
    const uint16_t *z, *dy;
    const float *prob;
    uint4 gate, linear, g;
    float p;
} gmm_cast_gradient_row;
GMM__DEVICE void gmm_cast_gradient_load(const gmm__act_source *act, gmm_cast_gradient_row *r) {
    r->gate = __ldg((const uint4 *)(const void *)r->z);
    r->linear = make_uint4(0u, 0u, 0u, 0u);
    if (act->gated) r->linear = __ldg((const uint4 *)(const void *)(r->z + act->linear));
    r->g = __ldg((const uint4 *)(const void *)r->dy);
    r->p = act->prob ? *r->prob : 1.0f;
}
GMM__DEVICE gmm_cast_gradient_row gmm_cast_gradient_begin(const gmm_cast_tile *t, int32_t h_col) {
    const gmm__act_source *act = &t->a->act;
    const int64_t row = t->p.source_row + t->p.row + min(t->row0, t->p.m - 1);
    gmm_cast_gradient_row r;
    r.z = (const uint16_t *)t->a->src.data + (row * t->a->src.ld + gmm__act_gate_column(h_col, act->interleave));
    r.dy = act->dy + (row * act->dy_ld + h_col);
    r.prob = act->prob + row;
    gmm_cast_gradient_load(act, &r);
    return r;
}
GMM__DEVICE void gmm_cast_unpack8(gmm_dtype dtype, uint4 v, float x[8]) {
    const uint32_t words[4] = { v.x, v.y, v.z, v.w };
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) x[i] = gmm__word_value(dtype, words, i);
}

/* Computes the slots, and writes the parts of dprob, of the tile of h at which t stands. Rows behind the strip's last
   one repeat it, and columns behind the last one repeat the first; these values are not used. */
GMM__DEVICE void gmm_cast_compute_gradient(const gmm_cast_tile *t, uint8_t *slots) {
    const gmm__act_source *act = &t->a->act;
    const int32_t h_col = t->c0 + t->col0, exists = h_col < act->ffn;
    gmm_cast_gradient_row next = gmm_cast_gradient_begin(t, exists ? h_col : 0);
    float *dots = act->dots + ((int64_t)(h_col / GMM_ACT_DOT_COLS) * t->a->rows + t->p.source_row + t->p.row +
                               t->row0);
    const int32_t dot_rows = exists && (gmm__lane() & 7) == 0 ? t->valid_rows : 0; /* of which the lane writes dots */
    uint4 *own = (uint4 *)(void *)slots + threadIdx.x;
    int32_t i, k;
#pragma unroll 1
    for (i = 0; i < 8; i++, own += GMM__QUANT_THREADS, dots++) {
        const float p = next.p;
        float gate[8], linear[8], g[8], h[8], d_gate[8], d_linear[8], dot = 0.0f;
        gmm_cast_unpack8(t->source, next.gate, gate);
        gmm_cast_unpack8(t->source, next.linear, linear);
        gmm_cast_unpack8(t->source, next.g, g);
        if (i + 1 < t->valid_rows) {
            next.z += t->a->src.ld;
            next.dy += act->dy_ld;
            next.prob++;
        }
        gmm_cast_gradient_load(act, &next);
        gmm__act_x8(act->kind, 0, act->coef, gate, linear, h, d_gate, d_linear);
#pragma unroll
        for (k = 0; k < 8; k++) {
            dot = fmaf(g[k], h[k], dot);
            d_gate[k] *= p * g[k];
            d_linear[k] *= p * g[k];
        }
        own[0] = gmm_pack8(t->source, d_gate);
        if (act->gated) own[8 * GMM__QUANT_THREADS] = gmm_pack8(t->source, d_linear);
        if (!act->dots) continue;
        dot = gmm__quarter_warp_sum(exists ? dot : 0.0f);
        if (i < dot_rows) *dots = dot;
    }
}
/* Moves from the tile of h that begins at column h0 to a tile of its gradient, `linear` 0 or 1, and loads it from the
   slots. */
GMM__DEVICE void gmm_cast_load_gradient(gmm_cast_tile *t, int32_t h0, int32_t linear, const uint8_t *slots,
                                        uint32_t x[8][8]) {
    const gmm__act_source *act = &t->a->act;
    const uint4 *own = (const uint4 *)(const void *)slots + (8 * linear * GMM__QUANT_THREADS + (int32_t)threadIdx.x);
    const int32_t c0 = gmm__act_gate_column(h0, act->interleave) + linear * act->linear;
    t->end = c0 + act->ffn - h0;
    gmm_cast_tile_at(t, c0);
    gmm_cast_load_slots(own, t->in_cols, t->valid_rows, x);
}
