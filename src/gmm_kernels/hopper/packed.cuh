/* Weights as codes: a stage holds boxes of 64 columns, 64 codes of each, FP8 swizzled by 64 bytes, then A, then four
   scale bytes of each column: those of the 16-element blocks of the stage, or of four 32-element blocks, of which an
   even stage has the first two. */

/* What the codes of a thread's two columns are multiplied by in a stage's steps of 16, twice in a word; FP8 by 2^120
   more, which its elements lack. `at`: the scales of the warp's 16 columns. Returns whether a product with FP8 would
   leave the range so. */
GMM__DEVICE int gmm_sm90_by(const int factor, uint32_t at, int odd, uint32_t by[2][4]) {
    const uint32_t lane = threadIdx.x & 31;
    int r, j, high = 0;
#pragma unroll
    for (r = 0; r < 2; r++) {
        uint32_t four, v[2];
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(four) : "r"(at + 4 * (lane / 4) + 32 * r) : "memory");
        if (factor == gmm9_factor_nv4) {
            gmm_q_fp8(GMM_BF16, GMM_E4M3, four, v);
#pragma unroll
            for (j = 0; j < 4; j++) by[r][j] = gmm_q_bytes(v[j / 2], 0u, j % 2 ? 0x3232u : 0x1010u);
            continue;
        }
        if (odd) four >>= 16;
#pragma unroll
        for (j = 0; j < 4; j++) {
            v[0] = four >> (j / 2 * 8) & 0xFFu;
            if (factor == gmm9_factor_mx8) {
                by[r][j] = v[0] * 0x00800080u + 0x3C003C00u;
                high |= v[0] > 134;
            } else by[r][j] = (v[0] == 0 ? 0x0040u : v[0] == 255 ? 0x7FFFu : v[0] << 7) * 0x00010001u;
        }
    }
    return high;
}
/* The codes of a thread in a stage, per step and column lane / 4 or 8 more: elements 2 (lane % 4) and 1, 8, 9 more, as
   FP8 or as two bytes. `at`: the codes of the warp's 16 columns. Returns whether FP8 has a NaN. */
GMM__DEVICE int gmm_sm90_codes(const int factor, uint32_t at, uint32_t codes[4][2]) {
    const uint32_t lane = threadIdx.x & 31, c = lane & 3;
    uint32_t odd = 0;
    int r, j;
#pragma unroll
    for (r = 0; r < 2; r++)
#pragma unroll
        for (j = 0; j < 4; j++)
            if (factor == gmm9_factor_mx8) {
                uint32_t low, high;
                asm volatile("{\n .reg .b16 x, y;\n ld.shared.b16 x, [%2];\n ld.shared.b16 y, [%2 + 8];\n"
                             " cvt.u32.u16 %0, x;\n cvt.u32.u16 %1, y;\n}" : "=r"(low), "=r"(high)
                             : "r"(at + lane / 4 * 64 + ((lane / 8 ^ (uint32_t)j) << 4) + 2 * c + 512 * r) : "memory");
                codes[j][r] = low | high << 16;
            } else if (j % 2 == 0) {
                uint32_t w[4];
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                             : "r"(at + lane / 4 * 32 + 256 * r + 8 * j) : "memory");
                codes[j][r] = gmm_q_bytes(w[0], w[1], c * 0x11u + 0x40u);
                codes[j + 1][r] = gmm_q_bytes(w[2], w[3], c * 0x11u + 0x40u);
            }
    if (factor == gmm9_factor_mx8)
#pragma unroll
        for (j = 0; j < 4; j++)
#pragma unroll
            for (r = 0; r < 2; r++) odd |= (codes[j][r] & 0x7F7F7F7Fu) + 0x01010101u;
    return (odd & 0x80808080u) != 0;
}
/* A thread's fragment for a step. */
GMM__DEVICE void gmm_sm90_fragment(const int factor, const uint32_t codes[2], uint32_t by0, uint32_t by1,
                                   uint32_t f[4]) {
    int r;
#pragma unroll
    for (r = 0; r < 2; r++) {
        const uint32_t u = codes[r], by = r ? by1 : by0;
        uint32_t x, y;
        if (factor == gmm9_factor_mx8) { /* fields at their places: 2^-120 of what they mean */
            x = gmm_q_bytes(u, 0u, 0x1404u);
            y = gmm_q_bytes(u, 0u, 0x3424u);
            x = (x & 0x80008000u) | (x >> 4 & 0x07F007F0u);
            y = (y & 0x80008000u) | (y >> 4 & 0x07F007F0u);
        } else { /* the bytes of eight values, and the signs */
            const uint32_t low = gmm_q_bytes(0xC0800000u, 0xC0804000u, u & 0x7777u);
            const uint32_t high = gmm_q_bytes(0x3F3F3F00u, 0x40404040u, u & 0x7777u), up = u << 4;
            x = gmm_q_bytes(low, high, 0x5140u) | (gmm_q_bytes(up, u, 0x4000u) & 0x80008000u);
            y = gmm_q_bytes(low, high, 0x7362u) | (gmm_q_bytes(up, u, 0x5111u) & 0x80008000u);
        }
        f[r] = gmm_q_times(GMM_BF16, x, by);
        f[r + 2] = gmm_q_times(GMM_BF16, y, by);
    }
}
/* The same for FP8 with NaN or scales above 2^7, of which `by` has 2^120 too much. */
GMM__DEVICE void gmm_sm90_fragment_far(const uint32_t codes[2], uint32_t scales0, uint32_t scales1, uint32_t f[4]) {
    int r;
#pragma unroll
    for (r = 0; r < 2; r++) {
        const uint32_t v = ((r ? scales1 : scales0) - 0x3C00u) >> 7 & 0xFFu; /* the byte again */
        const uint32_t by = (v == 0 ? 0x0040u : v == 255 ? 0x7FFFu : v << 7) * 0x00010001u;
        uint32_t to[2];
        gmm_q_fp8(GMM_BF16, GMM_E4M3, codes[r], to);
        f[r] = gmm_q_times(GMM_BF16, to[0], by);
        f[r + 2] = gmm_q_times(GMM_BF16, to[1], by);
    }
}

/* The sums of a tile by codes, for a group of 128 threads: it makes the fragments of a stage while the other group's
   are multiplied. `at_codes`, `at_scales`: of the warp, in stage 0; `stages` of `stage` bytes. */
GMM__DEVICE void gmm_sm90_sum_codes(const int factor, const int units, const uint32_t stages, const uint32_t stage,
                                    float *sum, uint32_t depths, uint32_t at_codes, uint32_t at_scales, uint64_t rows,
                                    uint32_t bars, uint32_t pair, uint32_t *at) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t q, s = *at % stages, parity = *at / stages & 1, by[2][4], codes[4][2], f[4][4];
    int j, far;
#pragma unroll 1
    for (q = 0; q < depths; q++) {
        const uint32_t a = (uint32_t)rows + s * (stage >> 4);
        gmm_bar_wait(bars + 16 * s, parity);
        far = gmm_sm90_codes(factor, at_codes + s * stage, codes);
        far |= gmm_sm90_by(factor, at_scales + s * stage, (int)(q & 1), by);
#pragma unroll
        for (j = 0; j < 4; j++) gmm_sm90_fragment(factor, codes[j], by[0][j], by[1][j], f[j]);
        if (factor == gmm9_factor_mx8 && far)
#pragma unroll
            for (j = 0; j < 4; j++) gmm_sm90_fragment_far(codes[j], by[0][j], by[1][j], f[j]);
        __syncwarp();
        gmm_wgmma_fence();
#pragma unroll
        for (j = 0; j < 4; j++)
            gmm_wgmma_held(units, sum, f[j], (rows & 0xFFFFFFFF00000000u) | (a + j * (32 >> 4)));
        gmm_wgmma_commit();
        GMM__WGMMA_WAIT(0); /* registers of products under way would be kept from all else */
        if (lane < pair) gmm_bar_arrive(bars + 16 * s + 8, lane);
        if (++s == stages) {
            s = 0;
            parity ^= 1;
        }
    }
    *at += depths;
}

/* Says, before tile number `tile`, that this warp has read the batch before it, if that was its last tile. */
GMM__DEVICE void gmm_sm90_tile_read(uint32_t told, uint32_t tile) {
    if (tile > 0 && tile % GMM_SM90_BATCH == 0)
        gmm_bar_arrive_here(told + 8 * (GMM_SM90_RING + (tile / GMM_SM90_BATCH - 1) % GMM_SM90_BATCHES));
}

/* Brings the scales of every stage to shared memory: one warp, lane by lane four columns. `scales`: in stage 0. */
GMM__DEVICE void gmm_sm90_scales(const gmm_sm90_args *args, const int factor, const int width, const uint32_t stages,
                                 const uint32_t stage, uint32_t scales, uint32_t bars, const gmm_sm90_tile *ring,
                                 uint32_t told) {
    const uint32_t lane = threadIdx.x & 31;
    const gmm_scaling scaling = factor == gmm9_factor_nv4 ? GMM_SCALING_NV16 : GMM_SCALING_MX32;
    uint32_t at = 0, turn = 0;
    int i, e;
    for (;; turn++) {
        const gmm_sm90_tile *const t = &ring[turn % GMM_SM90_RING];
        const uint8_t *line[4];
        uint32_t q, depths;
        int32_t blocks, step, whole;
        __syncwarp();
        if (lane == 0) gmm_sm90_tile_read(told, turn);
        gmm_bar_wait(told + 8 * (turn % GMM_SM90_RING), turn / GMM_SM90_RING & 1);
        if (t->units == 0) break;
        depths = gmm_sm90_depths(t->k);
        blocks = (t->k + width - 1) / width;
        {
            gmm_mat codes = args->codes;
            gmm__qview v;
            codes.scaling = scaling;
            v = gmm__qview_of(&codes, args->along, 0, t->g, 0, 0, args->rows, args->cols);
            step = gmm_q_steps(&codes, 0, v.lines).four;
            whole = ((uintptr_t)v.scale & 3) == 0;
#pragma unroll
            for (i = 0; i < 4; i++) {
                const int32_t c = (int32_t)lane + 32 * i;
                line[i] = v.scale + (c < t->cols ? gmm__qview_scale(&v, t->n0 + c, 0) : 0);
            }
        }
        for (q = 0; q < depths; q++, at++) {
            const uint32_t s = at % stages, full = bars + 16 * s, to = scales + s * stage + 4 * lane;
            const int32_t four = (int32_t)(width == 16 ? q : q / 2);
            const int32_t left = blocks - 4 * four < 4 ? blocks - 4 * four : 4;
            gmm_bar_wait(full + 8, (at / stages & 1) ^ 1);
#pragma unroll
            for (i = 0; i < 4; i++) {
                const int32_t count = (int32_t)lane + 32 * i < t->cols ? left : 0;
                const uint8_t *const from = line[i] + (int64_t)four * step;
                if (whole) /* bytes from `count` on become zeros */
                    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                                 : : "r"(to + 128 * i), "l"(__cvta_generic_to_global(from)), "r"(count) : "memory");
                else {
                    uint32_t word = 0;
#pragma unroll 1
                    for (e = 0; e < count; e++) word |= (uint32_t)from[e] << 8 * e;
                    asm volatile("st.shared.u32 [%0], %1;" : : "r"(to + 128 * i), "r"(word) : "memory");
                }
            }
            if (whole) asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(full) : "memory");
            else gmm_bar_arrive_here(full);
        }
    }
    asm volatile("cp.async.wait_all;" : : : "memory");
}

