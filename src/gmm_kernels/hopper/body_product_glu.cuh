/* GMM__BODY_PRODUCT, continued: the stores of glu and dglu products. */
#if (GMM__GLU || GMM__DGLU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Rounds a tile of D to 16 bits, which leaves the activation half of the accumulators' registers. */
GMM__DEVICE void GMM__PART(gmm_sm90_pack_tile_)(const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)],
                                                uint32_t words[GMM__CFG(wgmma_m)][4 * GMM__CFG(m16)]) {
    int u, j;
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++)
#pragma unroll
        for (u = 0; u < 4 * GMM__CFG(m16); u++)
            words[j][u] = gmm_pack2(GMM__DTYPE, acc[j][2 * u], acc[j][2 * u + 1]);
}
/* Writes part number `part` of these rows, as many as a slot holds, of 256 bytes each, to the slot, and joins the warp
   group. st_at: the thread's address for stmatrix in the slot. Words are selected by predicates, so that the code of
   the activation, which follows, stands once in a loop over parts. */
GMM__DEVICE void GMM__PART(gmm_sm90_write_slot_)(const gmm_sm90_output *out, uint32_t st_at, int part,
                                                 const uint32_t words[GMM__CFG(wgmma_m)][4 * GMM__CFG(m16)]) {
    const int count = 8 * GMM__CFG(store_blocks);
    int u, j;
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++)
#pragma unroll
        for (u = 0; u < GMM__CFG(m16); u++)
            gmm_stmatrix_x4_trans_if(16 * u / count == part, st_at + 16 * u % count * 256 + 128 * j, words[j][4 * u],
                                     words[j][4 * u + 1], words[j][4 * u + 2], words[j][4 * u + 3]);
    gmm_consumer_sync(out->wg);
}
#endif
#if GMM__GLU && defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Stores a tile of D, unless it is dropped, and of h. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_glu_)(const GMM__ARGS *args, const gmm_sm90_output *out, uint32_t *part,
                                                const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int count = 8 * GMM__CFG(store_blocks); /* rows of a slot */
    const int lane = gmm_tid_x() & 31, w = gmm_tid_x() >> 5 & 3;
    const uint32_t st_at = gmm_wgmma_stmatrix_at((uint32_t)__cvta_generic_to_shared(out->slots), 256, w, lane);
    /* of lane 0, so that ptxas knows that all threads loop as often: else the mainloop loses its uniform registers */
    const int rows = __shfl_sync(0xFFFFFFFFu, out->tile->rows, 0);
    uint32_t words[GMM__CFG(wgmma_m)][4 * GMM__CFG(m16)];
    int row;
    GMM__PART(gmm_sm90_pack_tile_)(acc, words);
#pragma unroll 1
    for (row = 0; row < rows; row += count, (*part)++) {
        const int slot = (*part & 1) * GMM__CFG(slot_bytes);
        float probs[2];
        gmm_sm90_glu_probs(&args->glu, out->tile, row, count, probs);
        GMM__PART(gmm_sm90_write_slot_)(out, st_at + slot, row / count, words);
        gmm_sm90_glu_store_h(&args->glu, GMM__DTYPE, out, out->slots + slot, row, count, probs);
        if (!args->glu.drops_d) gmm_sm90_glu_store_d(&args->glu, out, out->slots + slot, row, count);
    }
}
#endif
#if GMM__DGLU && defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Computes the activation's gradient for a tile of D, which is not stored. z is loaded 16 rows ahead. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_dglu_)(const GMM__ARGS *args, const gmm_sm90_output *out, uint32_t *part,
                                                 const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int count = 8 * GMM__CFG(store_blocks); /* rows of a slot */
    const int lane = gmm_tid_x() & 31, w = gmm_tid_x() >> 5 & 3;
    const uint32_t st_at = gmm_wgmma_stmatrix_at((uint32_t)__cvta_generic_to_shared(out->slots), 256, w, lane);
    const int rows = __shfl_sync(0xFFFFFFFFu, out->tile->rows, 0); /* uniform, for the registers of the mainloop */
    const gmm_sm90_dglu_thread thread = gmm_sm90_dglu_begin(&args->dglu, out->tile, out->col0);
    gmm_sm90_dglu_row next[2];
    uint32_t words[GMM__CFG(wgmma_m)][4 * GMM__CFG(m16)];
    int row, j;
    gmm_sm90_dglu_load(&args->dglu, &thread, 0, &next[0]);
    gmm_sm90_dglu_load(&args->dglu, &thread, 8, &next[1]);
    GMM__PART(gmm_sm90_pack_tile_)(acc, words);
#pragma unroll 1
    for (row = 0; row < rows; row += 16) {
        const int slot = (*part & 1) * GMM__CFG(slot_bytes);
        if (row % count == 0) GMM__PART(gmm_sm90_write_slot_)(out, st_at + slot, row / count, words);
#pragma unroll
        for (j = 0; j < 2; j++)
            gmm_sm90_dglu_step(&args->dglu, GMM__DTYPE, &thread, out->slots + slot + (row % count + 8 * j) * 256,
                               row + 8 * j, &next[j]);
        if ((row + 16) % count == 0 || row + 16 >= rows) (*part)++;
    }
}
#endif
