/* wgmma, in C++: the functions of src/gmm_kernels/common/ptx_wgmma.cuh. Each thread computes its own accumulators:
   thread t of a warp group holds rows 16 (t / 32) + t % 32 / 4 and 8 further of columns 8 j + 2 (t % 4) and the next. */
GMM__DEVICE uint64_t gmm_wgmma_desc(uint32_t smem, int mn_major) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(mn_major ? 8192 >> 4 : 1) << 16 |
           (smem & 0x3FFFF) >> 4;
}
GMM__DEVICE void gmm_wgmma_fence(void) {}
GMM__DEVICE void gmm_wgmma_commit(void) {}
#define GMM__WGMMA_WAIT(groups) ((void)0)

/* The shapes, by columns in units of 8; a kernel reads the first argument alone. */
#define GMM_WGMMA_LIST(X) \
    X(2, , , , , ) X(4, , , , , ) X(6, , , , , ) X(8, , , , , ) X(10, , , , , ) X(12, , , , , ) X(14, , , , , ) \
    X(16, , , , , ) X(17, , , , , ) X(18, , , , , ) X(19, , , , , ) X(20, , , , , ) X(21, , , , , ) X(22, , , , , ) \
    X(24, , , , , ) X(26, , , , , ) X(28, , , , , ) X(30, , , , , ) X(32, , , , , )

GMM__DEVICE void emulated_wgmma(int n8, float *d, uint64_t desc_a, uint64_t desc_b, int scale_d, int a_mn_major,
                                int b_mn_major, emulated_type a_type, emulated_type b_type) {
    const emulated_tile a_tile = { desc_a, a_mn_major, a_type }, b_tile = { desc_b, b_mn_major, b_type };
    const int row = 16 * (int)(threadIdx.x / 32 % 4) + EMULATED_LANE / 4;
    float a[2][32];
    emulated_wgmma_row(&a_tile, row, a[0]);
    emulated_wgmma_row(&a_tile, row + 8, a[1]);
    emulated_wgmma_product(n8, d, a, &b_tile, scale_d);
}
#define EMULATED_WGMMA(name, a_mn_major, b_mn_major, a_type, b_type, scale) \
    GMM__DEVICE void name(const int n8, float *d, uint64_t desc_a, uint64_t desc_b, const int scale_d = 1) { \
        emulated_wgmma(n8, d, desc_a, desc_b, scale, a_mn_major, b_mn_major, a_type, b_type); \
        (void)scale_d; \
    }
EMULATED_WGMMA(gmm_wgmma_bf16_fwd, 0, 0, EMULATED_BF16, EMULATED_BF16, scale_d)
EMULATED_WGMMA(gmm_wgmma_bf16_dgrad, 1, 0, EMULATED_BF16, EMULATED_BF16, scale_d)
EMULATED_WGMMA(gmm_wgmma_bf16_wgrad, 1, 1, EMULATED_BF16, EMULATED_BF16, scale_d)
EMULATED_WGMMA(gmm_wgmma_f16_fwd, 0, 0, EMULATED_F16, EMULATED_F16, scale_d)
EMULATED_WGMMA(gmm_wgmma_f16_dgrad, 1, 0, EMULATED_F16, EMULATED_F16, scale_d)
EMULATED_WGMMA(gmm_wgmma_f16_wgrad, 1, 1, EMULATED_F16, EMULATED_F16, scale_d)
EMULATED_WGMMA(gmm_wgmma_e4m3_add, 0, 0, EMULATED_E4M3, EMULATED_E4M3, scale_d)
EMULATED_WGMMA(gmm_wgmma_e5m2_add, 0, 0, EMULATED_E5M2, EMULATED_E4M3, scale_d)
EMULATED_WGMMA(gmm_wgmma_e4m3_set, 0, 0, EMULATED_E4M3, EMULATED_E4M3, 0)
EMULATED_WGMMA(gmm_wgmma_e5m2_set, 0, 0, EMULATED_E5M2, EMULATED_E4M3, 0)
#undef EMULATED_WGMMA

/* A in registers: lane l holds columns 2 (l % 4), the next, and both 8 further of rows l / 4 (registers 0, 2) and 8
   further (1, 3). */
GMM__DEVICE void gmm_wgmma_rs_bf16(const int n16, float *d, const uint32_t a_regs[4], uint64_t desc_b) {
    const emulated_value *all = emulated_exchange(0xFFFFFFFFu, a_regs, 16);
    const emulated_tile b_tile = { desc_b, 0, EMULATED_BF16 };
    float a[2][32];
    int row, k;
    for (row = 0; row < 2; row++)
        for (k = 0; k < 16; k++) {
            uint32_t pair;
            memcpy(&pair, all[EMULATED_LANE / 4 * 4 + k % 8 / 2].bytes + 4 * (k / 8 * 2 + row), 4);
            a[row][k] = emulated_half(GMM_BF16, pair, k & 1);
        }
    emulated_wgmma_product(2 * n16, d, a, &b_tile, 1);
}

