/* ................................................................................................ PTX ... */

/* One wrapper for each inline PTX instruction of the kernels, named as in the PTX manual; those of wgmma are in
   ptx_wgmma.cuh. `smem` is the 32-bit address of an operand in shared memory. Operands of constraint "n" must be
   constants, so their wrappers are macros. A "memory" clobber keeps the instruction in program order with memory
   accesses. */

/* --- special registers: read again at each use, so that their values do not occupy registers in between --- */
GMM__DEVICE int gmm_tid_x(void) {
    int tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}
GMM__DEVICE uint32_t gmm_cluster_ctarank(void) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
GMM__DEVICE uint32_t gmm_cluster_nctarank(void) {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

/* --- programmatic dependent launch --- */
GMM__DEVICE void gmm_griddepcontrol_launch_dependents(void) {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
GMM__DEVICE void gmm_griddepcontrol_wait(void) { asm volatile("griddepcontrol.wait;" : : : "memory"); }
/* The same instruction; the compiler must compute the variables `a` to `g` before it and may use them only after it. */
#define GMM__GRIDDEPCONTROL_WAIT_WITH(a, b, c, d, e, f, g) \
    asm volatile("griddepcontrol.wait;" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f), "+r"(g) : : "memory")
/* Keeps a load whose value is not used otherwise: the load brings a cache line. The conditional nanosleep of 0 ns
   depends on the word, so the compiler cannot remove the load. */
GMM__DEVICE void gmm_touch(uint32_t word) {
    asm volatile("{\n .reg .pred p;\n setp.eq.u32 p, %0, 1;\n @p nanosleep.u32 0;\n}" : : "r"(word) : "memory");
}

/* --- registers per thread, and barriers against reordering by the compiler --- */
#define GMM__SETMAXNREG_DEC(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(n))
#define GMM__SETMAXNREG_INC(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(n))
#define GMM__PIN_F32(x) asm volatile("" : "+f"(x) : : "memory") /* x and memory have their values at this point */
#define GMM__UNDEFINED_F32(x) asm volatile("" : "=f"(x))        /* x has an unknown value, for no instruction */
#define GMM__PIN_U32(x) asm volatile("" : "+r"(x))              /* x is computed anew after this point */
#define GMM__PIN_MEMORY() asm volatile("" : : : "memory")       /* loads and stores do not cross this point */

/* Whether this is the thread of the warp that is elected to act alone: ptxas knows that there is one, and passes its
   operands to TMA without a loop over lanes. Whole warp. */
GMM__DEVICE int gmm_elect_one(void) {
    int elected;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xFFFFFFFF;\n selp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected;
}

/* --- mbarrier --- */
GMM__DEVICE void gmm_mbarrier_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}
GMM__DEVICE void gmm_fence_mbarrier_init(void) { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
GMM__DEVICE void gmm_mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}
/* Waits until the barrier has completed the phase of this parity. */
GMM__DEVICE void gmm_mbarrier_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     " selp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
}
/* Whether it has; does not wait. */
GMM__DEVICE int gmm_mbarrier_test(uint32_t bar, uint32_t parity) {
    int done;
    asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 " selp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
GMM__DEVICE void gmm_mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}
/* The address of `smem` in the shared memory of CTA `rank` of the cluster. */
GMM__DEVICE uint32_t gmm_mapa(uint32_t smem, uint32_t rank) {
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(smem), "r"(rank));
    return at;
}
/* Arrives at a barrier by such an address. Reads of what the arrival releases are complete: wgmma has finished, and
   values of ld.shared have been used. So the default scope, the CTA, suffices; at cluster scope it would also wait for
   stores to device memory, once per stage. */
GMM__DEVICE void gmm_mbarrier_arrive_mapped(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(bar) : "memory");
}
/* Arrives at the same barrier of CTA `rank` of the cluster. */
GMM__DEVICE void gmm_mbarrier_arrive_remote(uint32_t bar, uint32_t rank) {
    gmm_mbarrier_arrive_mapped(gmm_mapa(bar, rank));
}
/* Writes one word into the shared memory of CTA `rank` of the cluster, and completes 4 bytes of transactions on its
   barrier. */
GMM__DEVICE void gmm_st_async_remote(uint32_t word, uint32_t bar, uint32_t rank, int value) {
    asm volatile("{\n .reg .b32 to, at;\n mapa.shared::cluster.u32 to, %0, %2;\n mapa.shared::cluster.u32 at, %1, %2;\n"
                 " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [at];\n}"
                 : : "r"(word), "r"(bar), "r"(rank), "r"(value) : "memory");
}

/* --- named barriers and the cluster barrier --- */
#define GMM__BAR_SYNC(id, threads) asm volatile("bar.sync %0, %1;" : : "n"(id), "n"(threads) : "memory")
GMM__DEVICE void gmm_bar_sync_128(int id) { asm volatile("bar.sync %0, 128;" : : "r"(id) : "memory"); }
GMM__DEVICE void gmm_bar_sync_256(int id) { asm volatile("bar.sync %0, 256;" : : "r"(id) : "memory"); }
GMM__DEVICE void gmm_bar_arrive_256(int id) { asm volatile("bar.arrive %0, 256;" : : "r"(id) : "memory"); }
GMM__DEVICE void gmm_cluster_arrive_relaxed(void) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}
GMM__DEVICE void gmm_cluster_arrive_release(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}
GMM__DEVICE void gmm_cluster_wait_acquire(void) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

/* --- shared and global memory --- */
GMM__DEVICE float gmm_ld_shared_f32(uint32_t smem) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(smem) : "memory");
    return v;
}
GMM__DEVICE void gmm_ld_shared_v2_f32(uint32_t smem, float v[2]) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(smem) : "memory");
}
GMM__DEVICE void gmm_ld_shared_v4_f32(uint32_t smem, float v[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(smem)
                 : "memory");
}
GMM__DEVICE uint32_t gmm_ld_shared_u32(uint32_t smem) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
    return v;
}
GMM__DEVICE void gmm_ld_shared_v4_u32(uint32_t smem, uint32_t v[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(smem)
                 : "memory");
}
/* Loads two 16-bit values that are 8 bytes apart. */
GMM__DEVICE void gmm_ld_shared_b16_pair(uint32_t smem, uint32_t *low, uint32_t *high) {
    asm volatile("{\n .reg .b16 x, y;\n ld.shared.b16 x, [%2];\n ld.shared.b16 y, [%2 + 8];\n"
                 " cvt.u32.u16 %0, x;\n cvt.u32.u16 %1, y;\n}" : "=r"(*low), "=r"(*high) : "r"(smem) : "memory");
}
GMM__DEVICE void gmm_st_shared_f32(uint32_t smem, float v) {
    asm volatile("st.shared.f32 [%0], %1;" : : "r"(smem), "f"(v) : "memory");
}
GMM__DEVICE void gmm_st_shared_v2_f32(uint32_t smem, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(smem), "f"(a), "f"(b) : "memory");
}
GMM__DEVICE void gmm_st_shared_v4_u32(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" : : "r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
GMM__DEVICE void gmm_st_shared_u32(uint32_t smem, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(smem), "r"(v) : "memory");
}
GMM__DEVICE void gmm_st_global_b32(void *dst, uint32_t a) {
    asm volatile("st.global.b32 [%0], %1;" : : "l"(__cvta_generic_to_global(dst)), "r"(a) : "memory");
}
GMM__DEVICE void gmm_st_global_v2_b32(void *dst, uint32_t a, uint32_t b) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" : : "l"(__cvta_generic_to_global(dst)), "r"(a), "r"(b) : "memory");
}
GMM__DEVICE void gmm_st_global_v4_b32(void *dst, uint4 v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 : : "l"(__cvta_generic_to_global(dst)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
GMM__DEVICE void gmm_prefetch_global_l2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
}

/* --- ldmatrix, stmatrix: four 8 x 8 matrices of 16-bit elements, one row address per lane; _trans transposes each
   --- */
GMM__DEVICE void gmm_ldmatrix_x4(uint32_t r[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem));
}
GMM__DEVICE void gmm_ldmatrix_x4_trans(uint32_t r[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem));
}
GMM__DEVICE void gmm_stmatrix_x4(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 : : "r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
GMM__DEVICE void gmm_stmatrix_x4_trans(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 : : "r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
/* The same where `enabled`, which is equal in all lanes of the warp. */
GMM__DEVICE void gmm_stmatrix_x4_trans_if(int enabled, uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %0, 0;\n"
                 " @p stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%1], {%2, %3, %4, %5};\n}"
                 : : "r"(enabled), "r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/* --- mma.sync m16n8k16: d += a b, where a is 16 x 16 and b is 16 x 8 --- */
GMM__DEVICE void gmm_mma_bf16(float d[4], const uint32_t a[4], const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
GMM__DEVICE void gmm_mma_f16(float d[4], const uint32_t a[4], const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* --- cp.async: global to shared memory --- */
GMM__DEVICE void gmm_cp_async_16(uint32_t smem, const char *src) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(smem), "l"(src));
}
/* Reads the first `bytes` of 16 bytes and writes zeros for the rest. */
GMM__DEVICE void gmm_cp_async_16_zfill(uint32_t smem, const char *src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(smem), "l"(src), "r"(bytes));
}
/* If `copies` is 0, does nothing; else copies 16 bytes or, if `zeros` is not 0, writes zeros and does not read. Lanes
   differ by predicates, not by branches. */
GMM__DEVICE void gmm_cp_async_16_where(int copies, uint32_t smem, const char *src, int zeros) {
    asm volatile("{\n.reg .pred copies, zeros;\nsetp.ne.s32 copies, %0, 0;\nsetp.ne.s32 zeros, %3, 0;\n"
                 "@copies cp.async.cg.shared.global [%1], [%2], 16, zeros;\n}"
                 : : "r"(copies), "r"(smem), "l"(src), "r"(zeros));
}
/* Reads the first `bytes` of 4 bytes and writes zeros for the rest. `global`: an address of the global state space. */
GMM__DEVICE void gmm_cp_async_4_zfill(uint32_t smem, size_t global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(smem), "l"(global), "r"(bytes) : "memory");
}
GMM__DEVICE void gmm_cp_async_commit_group(void) { asm volatile("cp.async.commit_group;"); }
#define GMM__CP_ASYNC_WAIT_GROUP(groups) asm volatile("cp.async.wait_group %0;" : : "n"(groups) : "memory")
GMM__DEVICE void gmm_cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" : : : "memory"); }
/* The barrier receives an arrival when all earlier cp.async copies of this thread are complete; the arrival count of
   the barrier includes it. */
GMM__DEVICE void gmm_cp_async_mbarrier_arrive(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(bar) : "memory");
}

/* --- TMA: one box of a 4-D tensor map --- */
GMM__DEVICE void gmm_prefetch_tensormap(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}
GMM__DEVICE void gmm_fence_proxy_async(void) { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
/* Loads a box into shared memory of this CTA or, with `multicast`, to the same offset in both CTAs of the cluster. */
GMM__DEVICE void gmm_tma_load(uint32_t smem, const CUtensorMap *map, uint32_t bar, int multicast, int32_t c0,
                              int32_t c1, int32_t c2, int32_t c3) {
    if (multicast)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" : : "r"(smem), "l"(map), "r"(bar), "r"(c0), "r"(c1),
                     "r"(c2), "r"(c3), "h"((uint16_t)3) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2];" : : "r"(smem), "l"(map), "r"(bar), "r"(c0), "r"(c1),
                     "r"(c2), "r"(c3) : "memory");
}
/* Stores a box to device memory or, with `add`, adds its fp32 elements to those in device memory. */
GMM__DEVICE void gmm_tma_store(const CUtensorMap *map, uint32_t smem, int add, int32_t c0, int32_t c1, int32_t c2,
                               int32_t c3) {
    if (add)
        asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
                     " [%0, {%2, %3, %4, %5}], [%1];" : : "l"(map), "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                     : : "l"(map), "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
/* Loads and stores with the L2 policy evict-first. */
GMM__DEVICE uint64_t gmm_createpolicy_evict_first(void) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
GMM__DEVICE void gmm_tma_load_evict_first(uint32_t smem, const CUtensorMap *map, uint32_t bar, int32_t c0, int32_t c1,
                                          int32_t c2, int32_t c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" : : "r"(smem), "l"(map), "r"(bar), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3), "l"(gmm_createpolicy_evict_first()) : "memory");
}
GMM__DEVICE void gmm_tma_store_evict_first(const CUtensorMap *map, uint32_t smem, int32_t c0, int32_t c1, int32_t c2,
                                           int32_t c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint"
                 " [%0, {%2, %3, %4, %5}], [%1], %6;" : : "l"(map), "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
                 "l"(gmm_createpolicy_evict_first()) : "memory");
}
GMM__DEVICE void gmm_tma_prefetch_l2(const CUtensorMap *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];"
                 : : "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
GMM__DEVICE void gmm_bulk_commit_group(void) { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }
/* Waits until at most so many bulk groups of this thread are pending; _READ waits only until their reads of shared
   memory are complete. */
#define GMM__BULK_WAIT_GROUP(groups) asm volatile("cp.async.bulk.wait_group %0;" : : "n"(groups) : "memory")
#define GMM__BULK_WAIT_GROUP_READ(groups) asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(groups) : "memory")

/* --- conversions --- */
GMM__DEVICE uint32_t gmm_cvt_bf16x2(float high, float low) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
GMM__DEVICE uint32_t gmm_cvt_f16x2(float high, float low) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
GMM__DEVICE float gmm_cvt_f32_f16(uint16_t bits) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
GMM__DEVICE uint16_t gmm_cvt_e4m3x2(float high, float low) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
GMM__DEVICE uint16_t gmm_cvt_e5m2x2(float high, float low) {
    uint16_t r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
/* Four E4M3 codes as two pairs of f16. */
GMM__DEVICE void gmm_cvt_f16x2_e4m3x2(uint32_t codes, uint32_t dst[2]) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
        "cvt.rn.f16x2.e4m3x2 %1, high; }" : "=r"(dst[0]), "=r"(dst[1]) : "r"(codes));
}
#endif

/* --- arithmetic with fixed rounding, which compiler flags neither contract, flush to zero nor reorder --- */
GMM__DEVICE float gmm_mul_rn_f32(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
GMM__DEVICE float gmm_add_rn_f32(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
GMM__DEVICE uint32_t gmm_prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}
/* Products of two pairs, each rounded once; subnormal values are kept. There is no mul.rn.bf16x2 before sm_90, so
   bf16 takes fma(a, b, -0). */
GMM__DEVICE uint32_t gmm_mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}
GMM__DEVICE uint32_t gmm_mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* --- maxima. bf16x2 and f16x2 take signed values: callers clear sign bits. max_abs and max_nan_abs return max(a, |b|),
   --- max_abs_abs max(|a|, |b|). max_nan variants return NaN if an operand is NaN, the others ignore it --- */
GMM__DEVICE uint32_t gmm_max_bf16x2(uint32_t a, uint32_t b) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_f16x2(uint32_t a, uint32_t b) {
    asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_abs_f32(uint32_t a, uint32_t b) {
    asm("{\n.reg .b32 t;\nabs.f32 t, %1;\nmax.f32 %0, %0, t;\n}" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_nan_bf16x2(uint32_t a, uint32_t b) {
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_nan_f16x2(uint32_t a, uint32_t b) {
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_nan_abs_f32(uint32_t a, uint32_t b) {
    asm("{\n.reg .b32 t;\nabs.f32 t, %1;\nmax.NaN.f32 %0, %0, t;\n}" : "+r"(a) : "r"(b));
    return a;
}
/* The operand of larger absolute value, with the exclusive or of both signs. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
GMM__DEVICE uint32_t gmm_max_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
    asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_xorsign_abs_f16x2(uint32_t a, uint32_t b) {
    asm("max.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
#endif
GMM__DEVICE uint32_t gmm_max_abs_abs_f32(uint32_t a, uint32_t b) {
    asm("{\n.reg .b32 s, t;\nabs.f32 s, %0;\nabs.f32 t, %1;\nmax.f32 %0, s, t;\n}" : "+r"(a) : "r"(b));
    return a;
}
/* max(maximum, |a| + |b|) */
GMM__DEVICE float gmm_max_sum_abs_f32(float maximum, float a, float b) {
    asm("{\n.reg .f32 s, t;\nabs.f32 s, %1;\nabs.f32 t, %2;\nadd.rn.f32 s, s, t;\nmax.f32 %0, %0, s;\n}"
        : "+f"(maximum) : "f"(a), "f"(b));
    return maximum;
}

/* --- E2M1 codes of absolute values --- */
/* |a b| */
GMM__DEVICE float gmm_mul_abs_f32(float a, float b) {
    float m;
    asm("{\n.reg .f32 t;\nabs.f32 %0, %1;\nabs.f32 t, %2;\nmul.rn.f32 %0, %0, t;\n}" : "=&f"(m) : "f"(a), "f"(b));
    return m;
}
/* min(m, 6); NaN becomes 6 */
GMM__DEVICE float gmm_min_6_f32(float m) {
    asm("min.f32 %0, %0, 0f40C00000;" : "+f"(m));
    return m;
}
/* 2 m, m + 2 and m / 2 + 4, each rounded to an integer (ties to even) by an addition to 2^23: the low bits of the
   fp32 sums */
GMM__DEVICE void gmm_e2m1_candidates(float m, uint32_t *low, uint32_t *middle, uint32_t *high) {
    asm("{\n.reg .f32 t;\nfma.rn.f32 t, %3, 0f40000000, 0f4B000000;\nmov.b32 %0, t;\n"
        "add.rn.f32 t, %3, 0f4B000002;\nmov.b32 %1, t;\n"
        "fma.rn.f32 t, %3, 0f3F000000, 0f4B000004;\nmov.b32 %2, t;\n}"
        : "=r"(*low), "=r"(*middle), "=r"(*high) : "f"(m));
}
/* Adds fraction_plus_128 - 128, in [0, 1), times the E2M1 step at m (half of the power of two at or below max(m, 1)),
   multiplies by 2^-126 and truncates: bits 22 and up hold the code. */
GMM__DEVICE uint32_t gmm_e2m1_add_fraction(float m, float fraction_plus_128) {
    uint32_t bits;
    asm("{\n.reg .f32 e, f, t;\n.reg .b32 u;\nmax.f32 e, %1, 0f3F800000;\nmov.b32 u, e;\n"
        "and.b32 u, u, 0x7F800000;\nmov.b32 e, u;\nfma.rn.f32 f, %2, 0f3F000000, 0fC2800000;\n"
        "fma.rn.f32 t, e, f, %1;\nmul.rz.f32 t, t, 0f00800000;\nmov.b32 %0, t;\n}"
        : "=r"(bits) : "f"(m), "f"(fraction_plus_128));
    return bits;
}
