/* ................................................................................................ PTX ... */

/* The wrappers of src/gmm_kernels/common/ptx.cuh, in C++ over emulator.h. Conversions use the codecs of gmm_quant.h,
   which have the bits of the instructions. */

GMM__DEVICE int gmm_tid_x(void) { return (int)threadIdx.x; }
GMM__DEVICE uint32_t gmm_cluster_ctarank(void) { return (uint32_t)emulated_thread->cta; }
GMM__DEVICE uint32_t gmm_cluster_nctarank(void) { return emulated_launch.cluster; }

/* --- a launch begins when its predecessor has ended; emulated_early_reads --- */
GMM__DEVICE void gmm_griddepcontrol_launch_dependents(void) {}
GMM__DEVICE void gmm_griddepcontrol_wait(void) { emulated_dependency_wait(); }
#define GMM__GRIDDEPCONTROL_WAIT_WITH(a, b, c, d, e, f, g) emulated_dependency_wait()

/* --- without effect here: registers and fences --- */
GMM__DEVICE void gmm_touch(uint32_t word) { (void)word; }
#define GMM__SETMAXNREG_DEC(n) ((void)0)
#define GMM__SETMAXNREG_INC(n) ((void)0)
#define GMM__PIN_F32(x) ((void)0)
#define GMM__UNDEFINED_F32(x) ((x) = NAN)
#define GMM__PIN_U32(x) ((void)0)
#define GMM__PIN_MEMORY() ((void)0)
GMM__DEVICE void gmm_fence_mbarrier_init(void) {}
GMM__DEVICE void gmm_fence_proxy_async(void) {}
GMM__DEVICE void gmm_prefetch_global_l2(const void *address) { (void)address; }
GMM__DEVICE void gmm_prefetch_tensormap(const CUtensorMap *map) { (void)map; }
GMM__DEVICE void gmm_tma_prefetch_l2(const CUtensorMap *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
    (void)map, (void)c0, (void)c1, (void)c2, (void)c3;
}

GMM__DEVICE int gmm_elect_one(void) { return threadIdx.x % 32 == 0; }

/* --- mbarrier --- */
GMM__DEVICE void gmm_mbarrier_init(uint32_t bar, uint32_t count) { emulated_mbarrier_init(bar, count); }
GMM__DEVICE void gmm_mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    emulated_mbarrier_arrive(bar, (int32_t)bytes);
}
GMM__DEVICE void gmm_mbarrier_wait(uint32_t bar, uint32_t parity) { emulated_mbarrier_wait(bar, parity); }
GMM__DEVICE int gmm_mbarrier_test(uint32_t bar, uint32_t parity) { return emulated_mbarrier_test(bar, parity); }
GMM__DEVICE void gmm_mbarrier_arrive(uint32_t bar) { emulated_mbarrier_arrive(bar, 0); }
GMM__DEVICE uint32_t gmm_mapa(uint32_t smem, uint32_t rank) { return emulated_mapa(smem, rank); }
GMM__DEVICE void gmm_mbarrier_arrive_mapped(uint32_t bar) { emulated_mbarrier_arrive(bar, 0); }
GMM__DEVICE void gmm_mbarrier_arrive_remote(uint32_t bar, uint32_t rank) {
    gmm_mbarrier_arrive_mapped(gmm_mapa(bar, rank));
}
GMM__DEVICE void gmm_st_async_remote(uint32_t word, uint32_t bar, uint32_t rank, int value) {
    memcpy((void *)(uintptr_t)emulated_mapa(word, rank), &value, sizeof value);
    emulated_mbarrier_complete(emulated_mapa(bar, rank), (int32_t)sizeof value);
}

/* --- named barriers and the cluster barrier --- */
#define GMM__BAR_SYNC(id, threads) emulated_barrier(id, threads)
GMM__DEVICE void gmm_bar_sync_128(int id) { emulated_barrier(id, 128); }
GMM__DEVICE void gmm_bar_sync_256(int id) { emulated_barrier(id, 256); }
GMM__DEVICE void gmm_bar_arrive_256(int id) { emulated_barrier_arrive(id, 256); }
GMM__DEVICE void gmm_cluster_arrive_relaxed(void) { emulated_cluster_arrive(); }
GMM__DEVICE void gmm_cluster_arrive_release(void) { emulated_cluster_arrive(); }
GMM__DEVICE void gmm_cluster_wait_acquire(void) { emulated_cluster_wait(); }

/* --- shared and global memory --- */
#define EMULATED_LOAD(v, address, align) \
    if ((uintptr_t)(address) % (align)) \
        emulated_fail("load from %p, no multiple of %d", (const void *)(address), align); \
    memcpy(v, (const void *)(address), align)
#define EMULATED_STORE(address, v, align) \
    if ((uintptr_t)(address) % (align)) \
        emulated_fail("store to %p, no multiple of %d", (const void *)(address), align); \
    memcpy((void *)(address), v, align)
#define EMULATED_SMEM(smem) ((char *)(uintptr_t)(smem))
GMM__DEVICE float gmm_ld_shared_f32(uint32_t smem) {
    float v;
    EMULATED_LOAD(&v, EMULATED_SMEM(smem), 4);
    return v;
}
GMM__DEVICE void gmm_ld_shared_v2_f32(uint32_t smem, float v[2]) { EMULATED_LOAD(v, EMULATED_SMEM(smem), 8); }
GMM__DEVICE void gmm_ld_shared_v4_f32(uint32_t smem, float v[4]) { EMULATED_LOAD(v, EMULATED_SMEM(smem), 16); }
GMM__DEVICE uint32_t gmm_ld_shared_u32(uint32_t smem) {
    uint32_t v;
    EMULATED_LOAD(&v, EMULATED_SMEM(smem), 4);
    return v;
}
GMM__DEVICE void gmm_ld_shared_v4_u32(uint32_t smem, uint32_t v[4]) { EMULATED_LOAD(v, EMULATED_SMEM(smem), 16); }
GMM__DEVICE void gmm_ld_shared_b16_pair(uint32_t smem, uint32_t *low, uint32_t *high) {
    uint16_t a, b;
    EMULATED_LOAD(&a, EMULATED_SMEM(smem), 2);
    EMULATED_LOAD(&b, EMULATED_SMEM(smem) + 8, 2);
    *low = a;
    *high = b;
}
GMM__DEVICE void gmm_st_shared_f32(uint32_t smem, float v) { EMULATED_STORE(EMULATED_SMEM(smem), &v, 4); }
GMM__DEVICE void gmm_st_shared_v2_f32(uint32_t smem, float a, float b) {
    const float v[2] = { a, b };
    EMULATED_STORE(EMULATED_SMEM(smem), v, 8);
}
GMM__DEVICE void gmm_st_shared_v4_u32(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t v[4] = { a, b, c, d };
    EMULATED_STORE(EMULATED_SMEM(smem), v, 16);
}
GMM__DEVICE void gmm_st_shared_u32(uint32_t smem, uint32_t v) { EMULATED_STORE(EMULATED_SMEM(smem), &v, 4); }
GMM__DEVICE void gmm_st_global_b32(void *dst, uint32_t a) { EMULATED_STORE(dst, &a, 4); }
GMM__DEVICE void gmm_st_global_v2_b32(void *dst, uint32_t a, uint32_t b) {
    const uint32_t v[2] = { a, b };
    EMULATED_STORE(dst, v, 8);
}
GMM__DEVICE void gmm_st_global_v4_b32(void *dst, uint4 v) { EMULATED_STORE(dst, &v, 16); }

/* --- ldmatrix, stmatrix: lane l gives the address of row l % 8 of matrix l / 8, and holds elements 2 (l % 4) and the
   next one of row l / 4 of each matrix; with `trans` of column l / 4 --- */
GMM__DEVICE void emulated_ldmatrix(uint32_t r[4], uint32_t smem, int trans) {
    const emulated_value *rows = emulated_exchange(0xFFFFFFFFu, &smem, sizeof smem);
    const int lane = EMULATED_LANE;
    int i, half;
    if (smem % 16) emulated_fail("ldmatrix at %08x, no multiple of 16", smem);
    for (i = 0; i < 4; i++) {
        uint16_t h[2];
        for (half = 0; half < 2; half++) {
            const int row = trans ? 2 * (lane % 4) + half : lane / 4, column = trans ? lane / 4 : 2 * (lane % 4) + half;
            uint32_t address;
            memcpy(&address, rows[8 * i + row].bytes, 4);
            memcpy(&h[half], EMULATED_SMEM(address + 2u * (uint32_t)column), 2);
        }
        r[i] = (uint32_t)h[1] << 16 | h[0];
    }
}
GMM__DEVICE void emulated_stmatrix(uint32_t smem, const uint32_t r[4], int trans) {
    const emulated_value *rows = emulated_exchange(0xFFFFFFFFu, &smem, sizeof smem);
    const int lane = EMULATED_LANE;
    int i, half;
    if (smem % 16) emulated_fail("stmatrix at %08x, no multiple of 16", smem);
    for (i = 0; i < 4; i++)
        for (half = 0; half < 2; half++) {
            const int row = trans ? 2 * (lane % 4) + half : lane / 4, column = trans ? lane / 4 : 2 * (lane % 4) + half;
            const uint16_t h = (uint16_t)(r[i] >> 16 * half);
            uint32_t address;
            memcpy(&address, rows[8 * i + row].bytes, 4);
            memcpy(EMULATED_SMEM(address + 2u * (uint32_t)column), &h, 2);
        }
    (void)emulated_exchange(0xFFFFFFFFu, NULL, 0);
}
GMM__DEVICE void gmm_ldmatrix_x4(uint32_t r[4], uint32_t smem) { emulated_ldmatrix(r, smem, 0); }
GMM__DEVICE void gmm_ldmatrix_x4_trans(uint32_t r[4], uint32_t smem) { emulated_ldmatrix(r, smem, 1); }
GMM__DEVICE void gmm_stmatrix_x4(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t r[4] = { a, b, c, d };
    emulated_stmatrix(smem, r, 0);
}
GMM__DEVICE void gmm_stmatrix_x4_trans(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t r[4] = { a, b, c, d };
    emulated_stmatrix(smem, r, 1);
}
GMM__DEVICE void gmm_stmatrix_x4_trans_if(int enabled, uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    if (enabled) gmm_stmatrix_x4_trans(smem, a, b, c, d);
}

/* --- mma.sync m16n8k16 --- */
GMM__DEVICE void gmm_mma_bf16(float d[4], const uint32_t a[4], const uint32_t *b) {
    emulated_mma(EMULATED_BF16, d, a, b);
}
GMM__DEVICE void gmm_mma_f16(float d[4], const uint32_t a[4], const uint32_t *b) {
    emulated_mma(EMULATED_F16, d, a, b);
}

/* --- cp.async --- */
GMM__DEVICE void gmm_cp_async_16(uint32_t smem, const char *src) { emulated_cp_async(smem, src, 16, 16); }
GMM__DEVICE void gmm_cp_async_16_zfill(uint32_t smem, const char *src, int bytes) {
    emulated_cp_async(smem, src, 16, bytes);
}
GMM__DEVICE void gmm_cp_async_16_where(int copies, uint32_t smem, const char *src, int zeros) {
    if (copies) emulated_cp_async(smem, src, 16, zeros ? 0 : 16);
}
GMM__DEVICE void gmm_cp_async_4_zfill(uint32_t smem, size_t global, int bytes) {
    emulated_cp_async(smem, (const char *)global, 4, bytes);
}
GMM__DEVICE void gmm_cp_async_commit_group(void) { emulated_cp_async_commit(); }
#define GMM__CP_ASYNC_WAIT_GROUP(groups) emulated_cp_async_wait(groups)
GMM__DEVICE void gmm_cp_async_wait_all(void) { emulated_cp_async_wait(-1); }
GMM__DEVICE void gmm_cp_async_mbarrier_arrive(uint32_t bar) { emulated_cp_async_arrive(bar); }

/* --- TMA --- */
GMM__DEVICE void gmm_tma_load(uint32_t smem, const CUtensorMap *map, uint32_t bar, int multicast, int32_t c0,
                              int32_t c1, int32_t c2, int32_t c3) {
    const int32_t at[4] = { c0, c1, c2, c3 };
    emulated_tma_load(smem, map, bar, multicast ? 3u : 1u << emulated_thread->cta, at);
}
GMM__DEVICE void gmm_tma_store(const CUtensorMap *map, uint32_t smem, int add, int32_t c0, int32_t c1, int32_t c2,
                               int32_t c3) {
    const int32_t at[4] = { c0, c1, c2, c3 };
    emulated_tma_store(map, smem, add, at);
}
GMM__DEVICE uint64_t gmm_createpolicy_evict_first(void) { return 0; }
GMM__DEVICE void gmm_tma_load_evict_first(uint32_t smem, const CUtensorMap *map, uint32_t bar, int32_t c0, int32_t c1,
                                          int32_t c2, int32_t c3) {
    gmm_tma_load(smem, map, bar, 0, c0, c1, c2, c3);
}
GMM__DEVICE void gmm_tma_store_evict_first(const CUtensorMap *map, uint32_t smem, int32_t c0, int32_t c1, int32_t c2,
                                           int32_t c3) {
    gmm_tma_store(map, smem, 0, c0, c1, c2, c3);
}
GMM__DEVICE void gmm_bulk_commit_group(void) { emulated_bulk_commit(); }
#define GMM__BULK_WAIT_GROUP(groups) emulated_bulk_wait(groups)
#define GMM__BULK_WAIT_GROUP_READ(groups) emulated_bulk_wait(groups)

/* --- conversions --- */
GMM__DEVICE uint32_t gmm_cvt_bf16x2(float high, float low) {
    return (uint32_t)gmm_f32_to_bf16(high) << 16 | gmm_f32_to_bf16(low);
}
GMM__DEVICE uint32_t gmm_cvt_f16x2(float high, float low) {
    return (uint32_t)gmm_f32_to_f16(high) << 16 | gmm_f32_to_f16(low);
}
GMM__DEVICE float gmm_cvt_f32_f16(uint16_t bits) { return gmm_f16_to_f32(bits); }
GMM__DEVICE uint16_t gmm_cvt_e4m3x2(float high, float low) {
    return (uint16_t)(gmm_f32_to_e4m3(high) << 8 | gmm_f32_to_e4m3(low));
}
GMM__DEVICE uint16_t gmm_cvt_e5m2x2(float high, float low) {
    return (uint16_t)(gmm_f32_to_e5m2(high) << 8 | gmm_f32_to_e5m2(low));
}
GMM__DEVICE void gmm_cvt_f16x2_e4m3x2(uint32_t codes, uint32_t dst[2]) {
    int i;
    for (i = 0; i < 2; i++, codes >>= 16)
        dst[i] = gmm_cvt_f16x2(gmm_e4m3_to_f32((uint8_t)(codes >> 8)), gmm_e4m3_to_f32((uint8_t)codes));
}

/* --- arithmetic --- */
GMM__DEVICE float gmm_mul_rn_f32(float a, float b) { return a * b; }
GMM__DEVICE float gmm_add_rn_f32(float a, float b) { return a + b; }
GMM__DEVICE uint32_t gmm_prmt(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
GMM__DEVICE float emulated_half(gmm_dtype dtype, uint32_t word, int high) {
    const uint16_t h = (uint16_t)(high ? word >> 16 : word);
    return dtype == GMM_BF16 ? gmm_bf16_to_f32(h) : gmm_f16_to_f32(h);
}
GMM__DEVICE uint32_t gmm_mul_bf16x2(uint32_t a, uint32_t b) {
    return gmm_cvt_bf16x2(emulated_half(GMM_BF16, a, 1) * emulated_half(GMM_BF16, b, 1),
                          emulated_half(GMM_BF16, a, 0) * emulated_half(GMM_BF16, b, 0));
}
GMM__DEVICE uint32_t gmm_mul_f16x2(uint32_t a, uint32_t b) {
    return gmm_cvt_f16x2(emulated_half(GMM_F16, a, 1) * emulated_half(GMM_F16, b, 1),
                         emulated_half(GMM_F16, a, 0) * emulated_half(GMM_F16, b, 0));
}

/* --- maxima. A half of a word is NaN above `infinity`; without `keeps_nan` the other operand wins. --- */
GMM__DEVICE uint32_t emulated_max_half(gmm_dtype dtype, uint32_t a, uint32_t b, int keeps_nan) {
    const uint32_t infinity = dtype == GMM_BF16 ? 0x7F80u : 0x7C00u;
    const int a_nan = (a & 0x7FFF) > infinity, b_nan = (b & 0x7FFF) > infinity;
    if ((a_nan && b_nan) || (keeps_nan && (a_nan || b_nan))) return 0x7FFF;
    if (a_nan || b_nan) return a_nan ? b : a;
    /* the order of sign and magnitude, in which -0 is below +0 */
    return (a & 0x8000 ? 0x8000 - (int32_t)(a & 0x7FFF) - 1 : 0x8000 + (int32_t)a) >
                   (b & 0x8000 ? 0x8000 - (int32_t)(b & 0x7FFF) - 1 : 0x8000 + (int32_t)b) ? a : b;
}
GMM__DEVICE uint32_t emulated_max_x2(gmm_dtype dtype, uint32_t a, uint32_t b, int keeps_nan) {
    return emulated_max_half(dtype, a >> 16, b >> 16, keeps_nan) << 16 |
           emulated_max_half(dtype, a & 0xFFFF, b & 0xFFFF, keeps_nan);
}
GMM__DEVICE uint32_t emulated_max_f32(uint32_t a, uint32_t b, int keeps_nan) {
    const float x = __uint_as_float(a), y = __uint_as_float(b);
    if ((x != x && y != y) || (keeps_nan && (x != x || y != y))) return 0x7FFFFFFFu;
    return x != x || y > x ? b : a;
}
GMM__DEVICE uint32_t gmm_max_bf16x2(uint32_t a, uint32_t b) { return emulated_max_x2(GMM_BF16, a, b, 0); }
GMM__DEVICE uint32_t gmm_max_f16x2(uint32_t a, uint32_t b) { return emulated_max_x2(GMM_F16, a, b, 0); }
GMM__DEVICE uint32_t gmm_max_abs_f32(uint32_t a, uint32_t b) { return emulated_max_f32(a, b & 0x7FFFFFFFu, 0); }
GMM__DEVICE uint32_t gmm_max_nan_bf16x2(uint32_t a, uint32_t b) { return emulated_max_x2(GMM_BF16, a, b, 1); }
GMM__DEVICE uint32_t gmm_max_nan_f16x2(uint32_t a, uint32_t b) { return emulated_max_x2(GMM_F16, a, b, 1); }
GMM__DEVICE uint32_t gmm_max_nan_abs_f32(uint32_t a, uint32_t b) { return emulated_max_f32(a, b & 0x7FFFFFFFu, 1); }
GMM__DEVICE uint32_t gmm_max_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
    return emulated_max_x2(GMM_BF16, a & 0x7FFF7FFFu, b & 0x7FFF7FFFu, 0) | ((a ^ b) & 0x80008000u);
}
GMM__DEVICE uint32_t gmm_max_xorsign_abs_f16x2(uint32_t a, uint32_t b) {
    return emulated_max_x2(GMM_F16, a & 0x7FFF7FFFu, b & 0x7FFF7FFFu, 0) | ((a ^ b) & 0x80008000u);
}
GMM__DEVICE uint32_t gmm_max_abs_abs_f32(uint32_t a, uint32_t b) {
    return emulated_max_f32(a & 0x7FFFFFFFu, b & 0x7FFFFFFFu, 0);
}
GMM__DEVICE float gmm_max_sum_abs_f32(float maximum, float a, float b) {
    return __uint_as_float(emulated_max_f32(__float_as_uint(maximum), __float_as_uint(fabsf(a) + fabsf(b)), 0));
}

/* --- E2M1 codes of absolute values --- */
GMM__DEVICE float gmm_mul_abs_f32(float a, float b) { return fabsf(a) * fabsf(b); }
GMM__DEVICE float gmm_min_6_f32(float m) { return m < 6.0f ? m : 6.0f; }
GMM__DEVICE void gmm_e2m1_candidates(float m, uint32_t *low, uint32_t *middle, uint32_t *high) {
    *low = __float_as_uint(fmaf(m, 2.0f, 0x1p23f));
    *middle = __float_as_uint(m + (0x1p23f + 2.0f));
    *high = __float_as_uint(fmaf(m, 0.5f, 0x1p23f + 4.0f));
}
GMM__DEVICE uint32_t gmm_e2m1_add_fraction(float m, float fraction) {
    const float e = __uint_as_float(__float_as_uint(m > 1.0f ? m : 1.0f) & 0x7F800000u);
    const double sum = fmaf(e, fmaf(fraction, 0.5f, -64.0f), m);
    const double product = sum * 0x1p-126; /* exact in double precision; its first 149 binary places are kept */
    return product < 0.0 ? 0x80000000u | (uint32_t)(-product * 0x1p149)
           : product < 0x1p-126 ? (uint32_t)(product * 0x1p149)
                                : __float_as_uint((float)sum) - (126u << 23);
}
