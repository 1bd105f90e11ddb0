/* wgmma, in C++: the functions of src/gmm_kernels/common/ptx_wgmma.cuh. Thread t of a warp
   group holds rows 16 (t / 32) + t % 32 / 4 and 8 further of columns 8 j + 2 (t % 4) and the next. */
GMM__DEVICE void gmm_wgmma_fence(void) {}
GMM__DEVICE void gmm_wgmma_commit(void) { emulated_wgmma_commit(); }
#define GMM__WGMMA_WAIT(groups) emulated_wgmma_wait(groups)

/* The shapes, by columns in units of 8; a kernel reads the first argument alone. */
#define GMM_WGMMA_LIST(X) \
    X(2, , , , , ) X(4, , , , , ) X(6, , , , , ) X(8, , , , , ) X(10, , , , , ) X(12, , , , , ) X(14, , , , , ) \
    X(16, , , , , ) X(17, , , , , ) X(18, , , , , ) X(19, , , , , ) X(20, , , , , ) X(21, , , , , ) X(22, , , , , ) \
    X(24, , , , , ) X(26, , , , , ) X(28, , , , , ) X(30, , , , , ) X(32, , , , , )

#define EMULATED_WGMMA(name, a_mn_major, b_mn_major, a_type, b_type, scale) \
    GMM__DEVICE void name(const int n8, float *d, uint64_t desc_a, uint64_t desc_b, const int scale_d = 1) { \
        const emulated_tile a = { desc_a, a_mn_major, a_type }, b = { desc_b, b_mn_major, b_type }; \
        emulated_wgmma(n8, d, &a, NULL, &b, scale); \
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

GMM__DEVICE void gmm_wgmma_rs_bf16(const int n16, float *d, const uint32_t a_regs[4], uint64_t desc_b,
                                   const int scale_d = 1) {
    const emulated_tile b = { desc_b, 0, EMULATED_BF16 };
    emulated_wgmma(2 * n16, d, NULL, a_regs, &b, scale_d);
}

