/* The epilogue of glu products: h = p act(D), from rows of D in a store slot, where they are rounded to 16 bits as they
   are stored. So h has the bits that the activation computes from D in memory.

   A row of the slot has 64 gate columns and the 64 linear columns that belong to them, in blocks as in D, or, where
   blocks are larger, one after the other. 8 threads share a row of h, and 16 a row of D, with a vector of 8 columns
   each; all vectors are within the matrices, since ffn is a multiple of 64. Rows of D and h begin at multiples of 16
   bytes: gmm__wgmma_serves_glu checks D, and h is in the workspace or in what forward saves. */

/* The probabilities of a thread's rows of h, of a slot with `count` rows from row `row` of the tile on. */
GMM__DEVICE void gmm_sm90_glu_probs(const gmm_sm90_glu *glu, const gmm_sm90_tile *t, int row, const int count,
                                    float probs[2]) {
    int x;
#pragma unroll
    for (x = 0; x < count / 16; x++) {
        const int line = row + 16 * x + (gmm_tid_x() & 127) / 8;
        probs[x] = glu->prob && line < t->rows ? glu->prob[(int64_t)t->row + t->m0 + line] : 1.0f;
    }
}

/* The vector of 8 columns from column `column` on, in a line of a slot. */
GMM__DEVICE uint4 gmm_sm90_slot_vector(const char *slot, int line, int column) {
    return *(const uint4 *)(slot + line * 256 + (((column / 8) ^ (line & 7)) << 4));
}
GMM__DEVICE void gmm_sm90_widen8(const gmm_dtype dtype, uint4 v, float f[8]) {
    const uint32_t words[4] = { v.x, v.y, v.z, v.w };
    int i;
#pragma unroll
    for (i = 0; i < 8; i++) f[i] = gmm_widen(dtype, (uint16_t)(words[i / 2] >> 16 * (i % 2)));
}

/* Computes and stores rows of h, those of gmm_sm90_glu_probs. */
GMM__DEVICE void gmm_sm90_glu_store_h(const gmm_sm90_glu *glu, const gmm_dtype dtype, const gmm_sm90_output *out,
                                      const char *slot, int row, const int count, const float probs[2]) {
    const gmm_sm90_tile *const t = out->tile;
    const int tid = gmm_tid_x() & 127, column = tid % 8 * 8, block = glu->block < 64 ? glu->block : 64;
    const int gate = column + (column & -block); /* blocks are powers of two here */
    char *const to = (char *)glu->h.data +
                     (((int64_t)t->row + t->m0 + row) * glu->h.ld + (t->n0 + out->col0) / 2 + column) * 2;
    int x, i;
#pragma unroll
    for (x = 0; x < count / 16; x++) {
        const int line = 16 * x + tid / 8;
        float a[8], b[8], f[8], da[8], db[8];
        gmm_sm90_widen8(dtype, gmm_sm90_slot_vector(slot, line, gate), a);
        gmm_sm90_widen8(dtype, gmm_sm90_slot_vector(slot, line, gate + block), b);
        gmm__act_x8(glu->kind, 1, glu->coef, a, b, f, da, db);
#pragma unroll
        for (i = 0; i < 8; i++) f[i] = probs[x] * f[i];
        if (row + line < t->rows)
            *(uint4 *)(to + line * glu->h.ld * 2) = gmm_pack8(dtype, f);
    }
}

/* Stores the rows of D in a slot. */
GMM__DEVICE void gmm_sm90_glu_store_d(const gmm_sm90_glu *glu, const gmm_sm90_output *out, const char *slot, int row,
                                      const int count) {
    const int tid = gmm_tid_x() & 127, column = tid % 16 * 8;
    char *const to = out->d + row * out->pitch +
                     gmm_sm90_glu_column(glu->block, out->tile->n0 + out->col0 + column) * (int64_t)2;
    uint4 v[4];
    int x;
#pragma unroll
    for (x = 0; x < count / 8; x++) v[x] = gmm_sm90_slot_vector(slot, 8 * x + tid / 16, column);
#pragma unroll
    for (x = 0; x < count / 8; x++)
        if (row + 8 * x + tid / 16 < out->tile->rows) *(uint4 *)(to + (8 * x + tid / 16) * out->pitch) = v[x];
}

/* --- dglu products --- */

/* 16 threads share a row of D, with a vector of 8 columns each, and a quarter of a warp a part of dprob. */
typedef struct gmm_sm90_dglu_thread {
    int32_t row;    /* of the token matrices: the thread's first */
    int32_t rows;   /* of the tile from that one on; 0 or less: none, also where the columns are behind those of D */
    int32_t column; /* of D: the vector's first */
    int32_t gate;   /* of z: that of its gate values */
} gmm_sm90_dglu_thread;
GMM__DEVICE gmm_sm90_dglu_thread gmm_sm90_dglu_begin(const gmm_sm90_dglu *g, const gmm_sm90_tile *t, int col0) {
    const int line = (gmm_tid_x() & 127) / 16, column = col0 + gmm_tid_x() % 16 * 8;
    gmm_sm90_dglu_thread thread;
    thread.row = t->row + t->m0 + line;
    thread.rows = column < t->cols ? t->rows - line : 0;
    thread.column = t->n0 + column;
    thread.gate = thread.column + (g->interleave ? thread.column / g->interleave * g->interleave : 0);
    return thread;
}
/* A thread's inputs of a row, in memory format. */
typedef struct gmm_sm90_dglu_row {
    uint4 gate, linear;
    float p;
} gmm_sm90_dglu_row;
/* Loads those of the row `row` rows behind the thread's first one. */
GMM__DEVICE void gmm_sm90_dglu_load(const gmm_sm90_dglu *g, const gmm_sm90_dglu_thread *thread, int row,
                                    gmm_sm90_dglu_row *in) {
    const char *const z = (const char *)g->z.data + ((int64_t)(thread->row + row) * g->z.ld + thread->gate) * 2;
    in->gate = in->linear = make_uint4(0u, 0u, 0u, 0u);
    in->p = 1.0f;
    if (row >= thread->rows) return;
    in->gate = *(const uint4 *)z;
    in->linear = *(const uint4 *)(z + 2 * g->linear);
    if (g->prob) in->p = g->prob[thread->row + row];
}
/* Computes and stores what follows from 8 rows of D, of which `slot` has the first. *in is the thread's row, and gets
   the one 16 rows behind it. */
GMM__DEVICE void gmm_sm90_dglu_step(const gmm_sm90_dglu *g, const gmm_dtype dtype, const gmm_sm90_dglu_thread *thread,
                                    const char *slot, int row, gmm_sm90_dglu_row *in) {
    const int tid = gmm_tid_x() & 127;
    const int64_t at = thread->row + row;
    const float p = in->p;
    float a[8], b[8], d[8], f[8], da[8], db[8], dot = 0.0f;
    int i;
    gmm_sm90_widen8(dtype, in->gate, a);
    gmm_sm90_widen8(dtype, in->linear, b);
    gmm_sm90_widen8(dtype, gmm_sm90_slot_vector(slot, tid / 16, tid % 16 * 8), d);
    gmm_sm90_dglu_load(g, thread, row + 16, in);
    gmm__act_x8(g->kind, 1, g->coef, a, b, f, da, db);
#pragma unroll
    for (i = 0; i < 8; i++) {
        dot = fmaf(d[i], f[i], dot);
        da[i] *= p * d[i];
        db[i] *= p * d[i];
        f[i] *= p;
    }
    if (g->dots) {
        dot = gmm__quarter_warp_sum(dot);
        if (row < thread->rows && tid % 8 == 0) g->dots[thread->column / GMM_ACT_DOT_COLS * g->capacity + at] = dot;
    }
    if (row >= thread->rows) return;
    if (g->dz.data) {
        char *const dz = (char *)g->dz.data + (at * g->dz.ld + thread->gate) * 2;
        *(uint4 *)dz = gmm_pack8(dtype, da);
        *(uint4 *)(dz + 2 * g->linear) = gmm_pack8(dtype, db);
    }
    if (g->h.data) *(uint4 *)((char *)g->h.data + (at * g->h.ld + thread->column) * 2) = gmm_pack8(dtype, f);
}

/* The gated activation of an FP8 product: h = p act(D), where D, the pre-activation, has been rounded to BF16, and the
   rowwise copy of h, quantized by 1x128. A tile has the 128 columns of h that share a scale, and the stages of two
   passes over the contraction. The first pass multiplies by the gate columns of B, the second by the linear columns
   that belong to them. The scheduler counts columns of h: p.n is ffn, while B and D have 2 ffn columns
   (gmm_fp8_glu_column). The gate columns of D stay in the store slot until the second pass ends (body_fp8_glu.cuh). */
typedef struct gmm_fp8_glu {
    gmm_mat h;         /* [T, ffn] its rowwise copy: E4M3 with 1X128 scales */
    const float *prob; /* [T] p; NULL: 1 */
    gmm_act_kind kind;
    gmm_act_coef coef;
    int32_t block;     /* B's rows, which are D's columns, are blocks of as many gate columns and linear columns: a
                          multiple of 128; halves: ffn */
    int32_t drops_d;   /* D is not stored */
    float eps;         /* gmm_format.eps and pow2 of the copy */
    int32_t pow2;
} gmm_fp8_glu;
