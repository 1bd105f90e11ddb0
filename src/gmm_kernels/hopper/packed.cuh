/* Weights as codes: a stage holds boxes of 64 columns, 64 codes of each, FP8 swizzled by 64 bytes, then A, then four
   scale bytes of each column: those of the 16-element blocks of the stage, or of four 32-element blocks, of which an
   even stage has the first two. */

/* What the codes of a thread's two columns are multiplied by in a stage's steps of 16, twice in a word; FP8 by 2^120
   more, which its elements lack. `at`: the scales of the warp's 16 columns. Returns whether a product with FP8 would
   leave the range so. */
GMM__DEVICE int gmm_sm90_packed_scales(const int b_format, uint32_t smem_at, int odd, uint32_t scales[2][4]) {
    const uint32_t lane = threadIdx.x & 31;
    int r, j, wide = 0;
#pragma unroll
    for (r = 0; r < 2; r++) {
        uint32_t word = gmm_ld_shared_u32(smem_at + 4 * (lane / 4) + 32 * r), v[2];
        if (b_format == gmm_sm90_b_format_nv4) {
            gmm_q_fp8(GMM_BF16, GMM_E4M3, word, v);
#pragma unroll
            for (j = 0; j < 4; j++) scales[r][j] = gmm_prmt(v[j / 2], 0u, j % 2 ? 0x3232u : 0x1010u);
            continue;
        }
        if (odd) word >>= 16;
#pragma unroll
        for (j = 0; j < 4; j++) {
            v[0] = word >> (j / 2 * 8) & 0xFFu;
            if (b_format == gmm_sm90_b_format_mx8) {
                scales[r][j] = v[0] * 0x00800080u + 0x3C003C00u;
                wide |= v[0] > 134;
            } else scales[r][j] = (v[0] == 0 ? 0x0040u : v[0] == 255 ? 0x7FFFu : v[0] << 7) * 0x00010001u;
        }
    }
    return wide;
}
/* The codes of a thread in a stage, per step and column lane / 4 or 8 more: elements 2 (lane % 4) and 1, 8, 9 more, as
   FP8 or as two bytes. `at`: the codes of the warp's 16 columns. Returns whether FP8 has a NaN. */
GMM__DEVICE int gmm_sm90_packed_load(const int b_format, uint32_t smem_at, uint32_t codes[4][2]) {
    const uint32_t lane = threadIdx.x & 31, c = lane & 3;
    uint32_t nan = 0;
    int r, j;
#pragma unroll
    for (r = 0; r < 2; r++)
#pragma unroll
        for (j = 0; j < 4; j++)
            if (b_format == gmm_sm90_b_format_mx8) {
                uint32_t low, high;
                gmm_ld_shared_b16_pair(smem_at + lane / 4 * 64 + ((lane / 8 ^ (uint32_t)j) << 4) + 2 * c + 512 * r, &low, &high);
                codes[j][r] = low | high << 16;
            } else if (j % 2 == 0) {
                uint32_t w[4];
                gmm_ld_shared_v4_u32(smem_at + lane / 4 * 32 + 256 * r + 8 * j, w);
                codes[j][r] = gmm_prmt(w[0], w[1], c * 0x11u + 0x40u);
                codes[j + 1][r] = gmm_prmt(w[2], w[3], c * 0x11u + 0x40u);
            }
    if (b_format == gmm_sm90_b_format_mx8)
#pragma unroll
        for (j = 0; j < 4; j++)
#pragma unroll
            for (r = 0; r < 2; r++) nan |= (codes[j][r] & 0x7F7F7F7Fu) + 0x01010101u;
    return (nan & 0x80808080u) != 0;
}
/* A thread's fragment for a step. */
GMM__DEVICE void gmm_sm90_packed_fragment(const int b_format, const uint32_t codes[2], uint32_t scales0,
                                          uint32_t scales1,
                                          uint32_t fragment[4]) {
    int r;
#pragma unroll
    for (r = 0; r < 2; r++) {
        const uint32_t u = codes[r], scale = r ? scales1 : scales0;
        uint32_t x, y;
        if (b_format == gmm_sm90_b_format_mx8) { /* fields at their places: 2^-120 of what they mean */
            x = gmm_prmt(u, 0u, 0x1404u);
            y = gmm_prmt(u, 0u, 0x3424u);
            x = (x & 0x80008000u) | (x >> 4 & 0x07F007F0u);
            y = (y & 0x80008000u) | (y >> 4 & 0x07F007F0u);
        } else { /* the bytes of eight values, and the signs */
            const uint32_t low = gmm_prmt(0xC0800000u, 0xC0804000u, u & 0x7777u);
            const uint32_t high = gmm_prmt(0x3F3F3F00u, 0x40404040u, u & 0x7777u), up = u << 4;
            x = gmm_prmt(low, high, 0x5140u) | (gmm_prmt(up, u, 0x4000u) & 0x80008000u);
            y = gmm_prmt(low, high, 0x7362u) | (gmm_prmt(up, u, 0x5111u) & 0x80008000u);
        }
        fragment[r] = gmm_q_times(GMM_BF16, x, scale);
        fragment[r + 2] = gmm_q_times(GMM_BF16, y, scale);
    }
}
/* The same for FP8 with NaN or scales above 2^7, of which `by` has 2^120 too much. */
GMM__DEVICE void gmm_sm90_packed_fragment_wide(const uint32_t codes[2], uint32_t scales0, uint32_t scales1,
                                               uint32_t fragment[4]) {
    int r;
#pragma unroll
    for (r = 0; r < 2; r++) {
        const uint32_t v = ((r ? scales1 : scales0) - 0x3C00u) >> 7 & 0xFFu; /* the byte again */
        const uint32_t scale = (v == 0 ? 0x0040u : v == 255 ? 0x7FFFu : v << 7) * 0x00010001u;
        uint32_t pair[2];
        gmm_q_fp8(GMM_BF16, GMM_E4M3, codes[r], pair);
        fragment[r] = gmm_q_times(GMM_BF16, pair[0], scale);
        fragment[r + 2] = gmm_q_times(GMM_BF16, pair[1], scale);
    }
}

/* The sums of a tile by codes, for a group of 128 threads: it makes the fragments of a stage while the other group's
   are multiplied. `at_codes`, `at_scales`: of the warp, in stage 0; `stages` of `stage` bytes. */
GMM__DEVICE void gmm_sm90_packed_mainloop(const int b_format, const int m16, const uint32_t stages,
                                          const uint32_t stage,
                                          float *acc, uint32_t k_tiles, uint32_t packed_at, uint32_t scales_at,
                                          uint64_t desc_a,
                                          uint32_t stage_bars, uint32_t cluster, uint32_t *iter) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t q, s = *iter % stages, parity = *iter / stages & 1, scales[2][4], packed[4][2], fragments[4][4];
    int j, wide;
#pragma unroll 1
    for (q = 0; q < k_tiles; q++) {
        const uint32_t a = (uint32_t)desc_a + s * (stage >> 4);
        gmm_mbarrier_wait(stage_bars + 16 * s, parity);
        wide = gmm_sm90_packed_load(b_format, packed_at + s * stage, packed);
        wide |= gmm_sm90_packed_scales(b_format, scales_at + s * stage, (int)(q & 1), scales);
#pragma unroll
        for (j = 0; j < 4; j++) gmm_sm90_packed_fragment(b_format, packed[j], scales[0][j], scales[1][j], fragments[j]);
        if (b_format == gmm_sm90_b_format_mx8 && wide)
#pragma unroll
            for (j = 0; j < 4; j++) gmm_sm90_packed_fragment_wide(packed[j], scales[0][j], scales[1][j], fragments[j]);
        __syncwarp();
        gmm_wgmma_fence();
#pragma unroll
        for (j = 0; j < 4; j++)
            gmm_wgmma_rs_bf16(m16, acc, fragments[j], (desc_a & 0xFFFFFFFF00000000u) | (a + j * (32 >> 4)));
        gmm_wgmma_commit();
        GMM__WGMMA_WAIT(0); /* registers of products under way would be kept from all else */
        if (lane < cluster) gmm_mbarrier_arrive_remote(stage_bars + 16 * s + 8, lane);
        if (++s == stages) {
            s = 0;
            parity ^= 1;
        }
    }
    *iter += k_tiles;
}

/* Says, before tile number `tile`, that this warp has read the batch before it, if that was its last tile. */
GMM__DEVICE void gmm_sm90_release_batch(uint32_t tile_full, uint32_t tile) {
    if (tile > 0 && tile % GMM_SM90_TILE_BATCH == 0)
        gmm_mbarrier_arrive(tile_full + 8 * (GMM_SM90_TILE_RING + (tile / GMM_SM90_TILE_BATCH - 1) % GMM_SM90_TILE_BATCHES));
}

/* Brings the scales of every stage to shared memory: one warp, lane by lane four columns. `scales`: in stage 0. */
GMM__DEVICE void gmm_sm90_load_scales(const gmm_sm90_args *args, const int b_format, const int width,
                                      const uint32_t stages,
                                      const uint32_t stage, uint32_t scales, uint32_t stage_bars,
                                      const gmm_sm90_tile *ring,
                                      uint32_t tile_full) {
    const uint32_t lane = threadIdx.x & 31;
    const gmm_scaling scaling = b_format == gmm_sm90_b_format_nv4 ? GMM_SCALING_NV16 : GMM_SCALING_MX32;
    uint32_t iter = 0, tile_index = 0;
    int i, e;
    for (;; tile_index++) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        const uint8_t *line[4];
        uint32_t q, k_tiles;
        int32_t blocks, word_step, aligned;
        __syncwarp();
        if (lane == 0) gmm_sm90_release_batch(tile_full, tile_index);
        gmm_mbarrier_wait(tile_full + 8 * (tile_index % GMM_SM90_TILE_RING), tile_index / GMM_SM90_TILE_RING & 1);
        if (t->row_blocks == 0) break;
        k_tiles = gmm_sm90_k_tiles(t->k);
        blocks = (t->k + width - 1) / width;
        {
            gmm_mat codes = args->codes;
            gmm__qview v;
            codes.scaling = scaling;
            v = gmm__qview_of(&codes, args->along, 0, t->g, 0, 0, args->rows, args->cols);
            word_step = gmm_q_steps(&codes, 0, v.lines).four;
            aligned = ((uintptr_t)v.scale & 3) == 0;
#pragma unroll
            for (i = 0; i < 4; i++) {
                const int32_t c = (int32_t)lane + 32 * i;
                line[i] = v.scale + (c < t->cols ? gmm__qview_scale(&v, t->n0 + c, 0) : 0);
            }
        }
        for (q = 0; q < k_tiles; q++, iter++) {
            const uint32_t s = iter % stages, full = stage_bars + 16 * s, to = scales + s * stage + 4 * lane;
            const int32_t word = (int32_t)(width == 16 ? q : q / 2);
            const int32_t left = blocks - 4 * word < 4 ? blocks - 4 * word : 4;
            gmm_mbarrier_wait(full + 8, (iter / stages & 1) ^ 1);
#pragma unroll
            for (i = 0; i < 4; i++) {
                const int32_t count = (int32_t)lane + 32 * i < t->cols ? left : 0;
                const uint8_t *const from = line[i] + (int64_t)word * word_step;
                if (aligned) /* bytes from `count` on become zeros */
                    gmm_cp_async_4_zfill(to + 128 * i, from, count);
                else {
                    uint32_t word = 0;
#pragma unroll 1
                    for (e = 0; e < count; e++) word |= (uint32_t)from[e] << 8 * e;
                    gmm_st_shared_u32(to + 128 * i, word);
                }
            }
            if (aligned) gmm_cp_async_mbarrier_arrive(full);
            else gmm_mbarrier_arrive(full);
        }
    }
    gmm_cp_async_wait_all();
}

