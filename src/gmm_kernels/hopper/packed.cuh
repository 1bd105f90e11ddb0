/* Packed weights (MX8, MX4, NV4) as the register operand of wgmma. A stage holds, for each block of 64 columns, a box
   of 64 codes per column (FP8 swizzled by 64 bytes), then A, then four scale bytes per column: those of the four blocks
   of 16 elements of this stage, or of four blocks of 32 elements, of which an even stage uses the first two. */

/* Scales of a thread's two columns for the stage's four steps of 16, as bf16x2 with equal halves; FP8 scales are
   multiplied by 2^120, by which the decoded elements are too small. smem_at: scales of the warp's 16
   columns; odd: the stage uses the upper two scale bytes. Returns whether a product could leave the range of bf16: then
   gmm_sm90_packed_fragment_wide makes the fragments. */
GMM__DEVICE int gmm_sm90_packed_scales(const int b_format, uint32_t smem_at, int odd, uint32_t scales[2][4]) {
    const uint32_t lane = threadIdx.x & 31;
    int r, j, wide = 0;
#pragma unroll
    for (r = 0; r < 2; r++) {
        uint32_t word = gmm_ld_shared_u32(smem_at + 4 * (lane / 4) + 32 * r), v[2];
        if (b_format == gmm_sm90_b_format_nv4) {
            gmm_fp8_to_16bit_x4(GMM_BF16, GMM_E4M3, word, v);
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
/* Codes of a thread for the stage's four steps: of columns lane / 4 and lane / 4 + 8, elements 2 (lane % 4), + 1, + 8
   and + 9, as four FP8 codes or as two bytes. smem_at: codes of the warp's 16 columns. Returns whether an FP8 code is
   NaN. */
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
                gmm_ld_shared_b16_pair(smem_at + lane / 4 * 64 + ((lane / 8 ^ (uint32_t)j) << 4) + 2 * c + 512 * r,
                                       &low, &high);
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
/* A thread's wgmma fragment for one step: codes times scales, as bf16x2. */
GMM__DEVICE void gmm_sm90_packed_fragment(const int b_format, const uint32_t codes[2], uint32_t scales0,
                                          uint32_t scales1, uint32_t fragment[4]) {
    int r;
#pragma unroll
    for (r = 0; r < 2; r++) {
        const uint32_t u = codes[r], scale = r ? scales1 : scales0;
        uint32_t x, y;
        if (b_format == gmm_sm90_b_format_mx8) { /* exponent and mantissa shifted to bf16's bits: 2^-120 of the value */
            x = gmm_prmt(u, 0u, 0x1404u);
            y = gmm_prmt(u, 0u, 0x3424u);
            x = (x & 0x80008000u) | (x >> 4 & 0x07F007F0u);
            y = (y & 0x80008000u) | (y >> 4 & 0x07F007F0u);
        } else { /* table lookup: low and high bytes of eight values, then the signs */
            const uint32_t low = gmm_prmt(0xC0800000u, 0xC0804000u, u & 0x7777u);
            const uint32_t high = gmm_prmt(0x3F3F3F00u, 0x40404040u, u & 0x7777u), up = u << 4;
            x = gmm_prmt(low, high, 0x5140u) | (gmm_prmt(up, u, 0x4000u) & 0x80008000u);
            y = gmm_prmt(low, high, 0x7362u) | (gmm_prmt(up, u, 0x5111u) & 0x80008000u);
        }
        fragment[r] = gmm_mul_16bit_x2(GMM_BF16, x, scale);
        fragment[r + 2] = gmm_mul_16bit_x2(GMM_BF16, y, scale);
    }
}
/* The same for FP8 codes with NaN or scales above 2^7, where the factor 2^120 would overflow. */
GMM__DEVICE void gmm_sm90_packed_fragment_wide(const uint32_t codes[2], uint32_t scales0, uint32_t scales1,
                                               uint32_t fragment[4]) {
    int r;
#pragma unroll
    for (r = 0; r < 2; r++) {
        const uint32_t v = ((r ? scales1 : scales0) - 0x3C00u) >> 7 & 0xFFu; /* the E8M0 byte again */
        const uint32_t scale = (v == 0 ? 0x0040u : v == 255 ? 0x7FFFu : v << 7) * 0x00010001u;
        uint32_t pair[2];
        gmm_fp8_to_16bit_x4(GMM_BF16, GMM_E4M3, codes[r], pair);
        fragment[r] = gmm_mul_16bit_x2(GMM_BF16, pair[0], scale);
        fragment[r + 2] = gmm_mul_16bit_x2(GMM_BF16, pair[1], scale);
    }
}

/* Mainloop of packed weights for a consumer warp group: it dequantizes the fragments of a stage while the other warp
   group multiplies. packed_at, scales_at: codes and scales of this warp in stage 0. */
GMM__DEVICE void gmm_sm90_packed_mainloop(const int b_format, const int m16, float *acc, uint32_t k_tiles,
                                          uint32_t packed_at, uint32_t scales_at, uint64_t desc_a,
                                          gmm_sm90_pipeline *pipe) {
    gmm_sm90_stage s = gmm_sm90_stage_at(pipe->iter, pipe->stages);
    uint32_t k;
    uint32_t scales[2][4], codes[4][2], fragments[4][4];
    int j, wide;
#pragma unroll 1
    for (k = 0; k < k_tiles; k++) {
        const uint32_t a = (uint32_t)desc_a + s.index * (pipe->stage_bytes >> 4);
        gmm_sm90_wait_full(pipe->bars, s);
        wide = gmm_sm90_packed_load(b_format, packed_at + s.index * pipe->stage_bytes, codes);
        wide |= gmm_sm90_packed_scales(b_format, scales_at + s.index * pipe->stage_bytes, (int)(k & 1), scales);
#pragma unroll
        for (j = 0; j < 4; j++) gmm_sm90_packed_fragment(b_format, codes[j], scales[0][j], scales[1][j], fragments[j]);
        if (b_format == gmm_sm90_b_format_mx8 && wide)
#pragma unroll
            for (j = 0; j < 4; j++) gmm_sm90_packed_fragment_wide(codes[j], scales[0][j], scales[1][j], fragments[j]);
        __syncwarp();
        gmm_wgmma_fence();
#pragma unroll
        for (j = 0; j < 4; j++)
            gmm_wgmma_rs_bf16(m16, acc, fragments[j], gmm_wgmma_desc_k_major(a + j * (32 >> 4)));
        gmm_wgmma_commit();
        GMM__WGMMA_WAIT(0); /* until then no other instruction may use the registers of the wgmma */
        gmm_sm90_release_stage(pipe, s.index);
        gmm_sm90_stage_advance(&s, pipe->stages);
    }
    pipe->iter += k_tiles;
}

/* The scale loader: one warp copies the scales of every stage to shared memory, lane l those of columns l + 32 i.
   `width`: elements per scale; `scales`: address of the scales in stage 0. */
GMM__DEVICE void gmm_sm90_load_scales(const gmm_sm90_args *args, const int b_format, const int width, uint32_t scales,
                                      gmm_sm90_pipeline pipe, const gmm_sm90_tile *ring, uint32_t bars) {
    const uint32_t lane = threadIdx.x & 31;
    const gmm_scaling scaling = b_format == gmm_sm90_b_format_nv4 ? GMM_SCALING_NV16 : GMM_SCALING_MX32;
    uint32_t tile_index = 0;
    int i, e;
    for (;; tile_index++) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        const uint8_t *line[4];
        uint32_t k, k_tiles;
        int32_t blocks, word_step, aligned;
        __syncwarp();
        if (lane == 0) gmm_sm90_release_batch(bars, tile_index);
        gmm_sm90_wait_tile(bars, tile_index);
        if (t->row_blocks == 0) break;
        k_tiles = gmm_sm90_k_tiles(t->k);
        blocks = (t->k + width - 1) / width;
        {
            gmm_mat codes = args->codes;
            gmm__qview v;
            codes.scaling = scaling;
            v = gmm__qview_of(&codes, args->along, 0, t->g, 0, 0, args->rows, args->cols);
            word_step = gmm_qgemm_scale_strides_of(&codes, 0, v.lines).block4;
            aligned = ((uintptr_t)v.scale & 3) == 0;
#pragma unroll
            for (i = 0; i < 4; i++) {
                const int32_t c = (int32_t)lane + 32 * i;
                line[i] = v.scale + (c < t->cols ? gmm__qview_scale(&v, t->n0 + c, 0) : 0);
            }
        }
        for (k = 0; k < k_tiles; k++, pipe.iter++) {
            const uint32_t s = pipe.iter % pipe.stages, full = gmm_sm90_full(pipe.bars, s);
            const uint32_t to = scales + s * pipe.stage_bytes + 4 * lane;
            const int32_t word = (int32_t)(width == 16 ? k : k / 2);
            const int32_t left = blocks - 4 * word < 4 ? blocks - 4 * word : 4;
            gmm_mbarrier_wait(gmm_sm90_empty(pipe.bars, s), (pipe.iter / pipe.stages & 1) ^ 1);
#pragma unroll
            for (i = 0; i < 4; i++) {
                const int32_t count = (int32_t)lane + 32 * i < t->cols ? left : 0;
                const uint8_t *const from = line[i] + (int64_t)word * word_step;
                if (aligned) /* bytes past `count` become zeros */
                    gmm_cp_async_4_zfill(to + 128 * i, __cvta_generic_to_global(from), count);
                else {
                    uint32_t bytes = 0;
#pragma unroll 1
                    for (e = 0; e < count; e++) bytes |= (uint32_t)from[e] << 8 * e;
                    gmm_st_shared_u32(to + 128 * i, bytes);
                }
            }
            if (aligned) gmm_cp_async_mbarrier_arrive(full);
            else gmm_mbarrier_arrive(full);
        }
    }
    gmm_cp_async_wait_all();
}

