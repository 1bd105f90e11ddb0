/* GMM__BODY_FP8, continued: the epilogue of a glu tile. The store slot holds the tile's gate columns from the first
   pass on. After the second pass each warp replaces its 16 rows of them by h, takes the largest absolute value of each
   row, and quantizes the row; then the linear columns follow in the slot. h has the bits of the activation of D in
   memory, and its copy those of a cast of h. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Address in a slot of the 16 columns from 16 * block on, for ldmatrix and stmatrix: a warp's 16 rows. */
GMM__DEVICE uint32_t GMM__PART(gmm_fp8_glu_block_)(uint32_t slot, int block) {
    const int tid = gmm_tid_x() & 127;
    return slot + (tid / 32 * 16 + tid % 16) * 128 + block / 4 * GMM_SM90_BOX_BYTES +
           (((block % 4 * 2 + tid % 32 / 16) ^ (tid % 8)) << 4);
}

/* Writes the gate columns of D to the slot, where they stay; it is passed on behind the first products of the second
   pass. */
GMM__DEVICE void GMM__PART(gmm_fp8_keep_gate_)(uint32_t base, int wg, const float acc[GMM__ACC], gmm_fp8_store *store) {
    gmm_fp8_wait_slot(store, GMM__SMEM_AT(slot_bars), wg);
    GMM__PART(gmm_fp8_write_slot_16_)(GMM_BF16, GMM__SMEM_AT(slot) + GMM__CFG(slot_bytes) * wg, 0, acc);
}

/* Replaces the warp's gate values in the slot by h. linear: the linear columns of D, two accumulators per word.
   maxima: of absolute values in the thread's rows, that of gmm_wgmma_acc_m and the one 8 further. The loop is not
   unrolled, so that the code of the activations stands once. */
GMM__DEVICE void GMM__PART(gmm_fp8_glu_activate_)(const gmm_fp8_glu *glu, uint32_t slot,
                                                  const uint32_t linear[GMM__ACC / 2], const float probs[2],
                                                  uint32_t maxima[2]) {
    int block, i, u;
    maxima[0] = maxima[1] = 0;
#pragma unroll 1
    for (block = 0; block < GMM__CFG(tile_n) / 16; block++) {
        const uint32_t at = GMM__PART(gmm_fp8_glu_block_)(slot, block);
        uint32_t gate[4], selected[4] = { 0, 0, 0, 0 }, h[4];
        float a[8], b[8], f[8], da[8], db[8];
        gmm_ldmatrix_x4(gate, at);
#pragma unroll
        for (u = 0; u < GMM__CFG(tile_n) / 16; u++)
#pragma unroll
            for (i = 0; i < 4; i++) selected[i] = u == block ? linear[4 * u + i] : selected[i];
#pragma unroll
        for (i = 0; i < 8; i++) {
            a[i] = gmm__word_value(GMM_BF16, gate, i);
            b[i] = gmm__word_value(GMM_BF16, selected, i);
        }
        gmm__act_x8(glu->kind, 1, glu->coef, a, b, f, da, db);
#pragma unroll
        for (i = 0; i < 4; i++) {
            h[i] = gmm_pack2(GMM_BF16, probs[i % 2] * f[2 * i], probs[i % 2] * f[2 * i + 1]);
            maxima[i % 2] = gmm__word_max(GMM_BF16, maxima[i % 2], h[i]);
        }
        gmm_stmatrix_x4(at, h[0], h[1], h[2], h[3]);
    }
#pragma unroll
    for (i = 0; i < 2; i++) { /* over the four lanes that share the row */
        maxima[i] = gmm__word_fold(GMM_BF16, maxima[i]);
        maxima[i] = max(maxima[i], __shfl_xor_sync(0xFFFFFFFFu, maxima[i], 1));
        maxima[i] = max(maxima[i], __shfl_xor_sync(0xFFFFFFFFu, maxima[i], 2));
    }
}

/* Stores the scales of the thread's rows, those of gmm_fp8_glu_activate_. The padding behind a group's rows is left as
   it is: FC2 of the same call alone reads the copy. first: the warp's first row of the tile. */
GMM__DEVICE void GMM__PART(gmm_fp8_glu_store_scales_)(const gmm_fp8_args *args, const gmm_fp8_tile *f, int first,
                                                      const float scales[2]) {
    const gmm_sm90_tile *const t = &f->t;
    gmm_mat h = args->glu.h;
    gmm__qview v;
    float *to;
    int i;
    h.scaling = GMM_SCALING_1X128; /* as a constant it saves divisions, whose calls would spill */
    v = gmm__qview_of(&h, GMM_ROWWISE, 1, t->g, t->row, f->padded_row, t->end - t->row, args->p.n);
    to = (float *)(void *)v.scale + gmm__qview_scale(&v, t->m0, t->n0 / 128);
    if (gmm_tid_x() & 3) return;
#pragma unroll
    for (i = 0; i < 2; i++) {
        const int row = first + (gmm_tid_x() & 31) / 4 + 8 * i;
        if (row < t->rows) to[row] = gmm_scale_inverse(scales[i]);
    }
}

/* Encodes and stores the warp's rows of h: 16 lanes have a row of the tile, 8 columns each. slot: its generic address.
   scales: of the thread's rows, as above. */
GMM__DEVICE void GMM__PART(gmm_fp8_glu_store_codes_)(const gmm_fp8_args *args, const gmm_sm90_tile *t, const char *slot,
                                                     int first, const float scales[2]) {
    const int lane = gmm_tid_x() & 31, vector = lane % 16;
    char *const to = (char *)args->glu.h.data + ((int64_t)t->row + t->m0 + first) * args->glu.h.ld + t->n0 + 8 * vector;
    int x, i;
#pragma unroll
    for (x = 0; x < 8; x++) {
        const int line = 2 * x + lane / 16;
        const float scale = __shfl_sync(0xFFFFFFFFu, scales[x / 4], line % 8 * 4);
        const uint4 v = *(const uint4 *)(slot + (first % GMM_FP8_BLOCK_ROWS + line) * 128 +
                                         vector / 8 * GMM_SM90_BOX_BYTES + ((vector % 8 ^ line % 8) << 4));
        const uint32_t words[4] = { v.x, v.y, v.z, v.w };
        float f[8];
#pragma unroll
        for (i = 0; i < 8; i++) f[i] = gmm__fmul(gmm__word_value(GMM_BF16, words, i), scale);
        if (first + line < t->rows)
            gmm_st_global_v2_b32(to + line * args->glu.h.ld, gmm_encode_fp8x4(0, f), gmm_encode_fp8x4(0, f + 4));
    }
}

/* Computes and stores h from the gate columns in the slot and the accumulators of the linear columns, which
   follow them in the slot. */
GMM__DEVICE void GMM__PART(gmm_fp8_store_glu_)(const gmm_fp8_args *args, const gmm_fp8_tile *f, const GMM__SMEM *smem,
                                               uint32_t base, int wg, const float acc[GMM__ACC], gmm_fp8_store *store) {
    const gmm_fp8_glu *const glu = &args->glu;
    const gmm_sm90_tile *const t = &f->t;
    const uint32_t slot = GMM__SMEM_AT(slot) + GMM__CFG(slot_bytes) * wg;
    const int tid = gmm_tid_x() & 127, first = 64 * wg + tid / 32 * 16;
    uint32_t linear[GMM__ACC / 2], maxima[2];
    float probs[2], scales[2];
    int u;
#pragma unroll
    for (u = 0; u < 2; u++) {
        const int row = first + tid % 32 / 4 + 8 * u;
        probs[u] = glu->prob && row < t->rows ? glu->prob[(int64_t)t->row + t->m0 + row] : 1.0f;
    }
#pragma unroll
    for (u = 0; u < GMM__ACC / 2; u++) linear[u] = gmm_pack2(GMM_BF16, acc[2 * u], acc[2 * u + 1]);
    gmm_fp8_wait_slot(store, GMM__SMEM_AT(slot_bars), wg); /* TMA has read the gate columns */
    GMM__PART(gmm_fp8_glu_activate_)(glu, slot, linear, probs, maxima);
#pragma unroll
    for (u = 0; u < 2; u++)
        scales[u] = gmm_scale_from_amax(gmm_f32_from_bits(maxima[u]), gmm_dtype_largest(GMM_E4M3),
                                        gmm_dtype_largest(GMM_BF16), glu->eps, glu->pow2);
    __syncwarp(); /* h is complete in the slot */
    GMM__PART(gmm_fp8_glu_store_scales_)(args, f, first, scales);
    GMM__PART(gmm_fp8_glu_store_codes_)(args, t, smem->slot[wg][0], first, scales);
    __syncwarp(); /* all lanes have read h */
    if (!glu->drops_d)
#pragma unroll
        for (u = 0; u < GMM__CFG(tile_n) / 16; u++)
            gmm_stmatrix_x4(GMM__PART(gmm_fp8_glu_block_)(slot, u), linear[4 * u], linear[4 * u + 1],
                            linear[4 * u + 2], linear[4 * u + 3]);
}
#endif
