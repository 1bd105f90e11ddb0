/* Barriers in shared memory (mbarrier), addressed as the 32-bit shared address of their 8 bytes. */
GMM__DEVICE void gmm_bar_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}
GMM__DEVICE void gmm_bar_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}
GMM__DEVICE void gmm_bar_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     " selp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
}
GMM__DEVICE void gmm_bar_arrive_here(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}
/* Arrives at the same barrier of block `rank` of the cluster. What it releases was read by wgmma and waited for; asked
   for at cluster scope, the release would wait for device memory besides, once per stage. */
GMM__DEVICE void gmm_bar_arrive(uint32_t bar, uint32_t rank) {
    asm volatile("{\n .reg .b32 at;\n mapa.shared::cluster.u32 at, %0, %1;\n"
                 " mbarrier.arrive.shared::cluster.b64 _, [at];\n}" : : "r"(bar), "r"(rank) : "memory");
}

/* From shared memory, in the order of the program: what is read early holds registers. */
GMM__DEVICE void gmm_shared_read4(uint32_t from, float v[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from)
                 : "memory");
}

GMM__DEVICE void gmm_shared_read2(uint32_t from, float v[2]) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(from) : "memory");
}
GMM__DEVICE float gmm_shared_read(uint32_t from) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
    return v;
}
GMM__DEVICE void gmm_shared_write(uint32_t to, float v) {
    asm volatile("st.shared.f32 [%0], %1;" : : "r"(to), "f"(v) : "memory");
}
/* threadIdx.x, read anew. */
GMM__DEVICE int gmm_tid(void) {
    int tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}

/* The block's number in its cluster, and their number, read anew. */
GMM__DEVICE uint32_t gmm_cluster_rank(void) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
GMM__DEVICE uint32_t gmm_cluster_size(void) {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

/* Waits for the other threads of this group of 128. */
GMM__DEVICE void gmm_bar_half(int half) {
    if (half) asm volatile("bar.sync 2, 128;" : : : "memory");
    else asm volatile("bar.sync 1, 128;" : : : "memory");
}
/* Group `half` waits (`wait`) until the other, who arrives there, says that it is its turn. */
GMM__DEVICE void gmm_bar_turn(int half, int wait) {
    if (wait) asm volatile("bar.sync %0, 256;" : : "r"(3 + half) : "memory");
    else asm volatile("bar.arrive %0, 256;" : : "r"(3 + half) : "memory");
}
GMM__DEVICE void gmm_bar_team(int team) {
    asm volatile("bar.sync %0, 128;" : : "r"(1 + team) : "memory");
}

/* One box by TMA, to this block or, with `both`, to the same place in both blocks of the cluster. */
GMM__DEVICE void gmm_tma_load(uint32_t to, const CUtensorMap *map, uint32_t bar, int both, int32_t c0, int32_t c1,
                              int32_t c2, int32_t c3) {
    if (both)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" : : "r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1),
                     "r"(c2), "r"(c3), "h"((uint16_t)3) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2];" : : "r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1),
                     "r"(c2), "r"(c3) : "memory");
}

/* Four 8 x 8 blocks of 16-bit elements to shared memory, one row address per lane, each block transposed. */
GMM__DEVICE void gmm_stmatrix_t(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 : : "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/* The same, if `wanted`, which the warp agrees on. */
GMM__DEVICE void gmm_stmatrix_t_if(int wanted, uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %0, 0;\n"
                 " @p stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%1], {%2, %3, %4, %5};\n}"
                 : : "r"(wanted), "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/* The same, not transposed. */
GMM__DEVICE void gmm_stmatrix(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 : : "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/* One box by TMA to device memory, or added to the fp32 numbers that stand there. */
GMM__DEVICE void gmm_tma_store(const CUtensorMap *map, uint32_t from, int added, int32_t c0, int32_t c1, int32_t c2,
                               int32_t c3) {
    if (added)
        asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
                     " [%0, {%2, %3, %4, %5}], [%1];" : : "l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                     : : "l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

/* The same, of what is read or written once: it gives way in the L2 before other lines. */
GMM__DEVICE uint64_t gmm_l2_once(void) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
GMM__DEVICE void gmm_tma_load_once(uint32_t to, const CUtensorMap *map, uint32_t bar, int32_t c0, int32_t c1,
                                   int32_t c2, int32_t c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" : : "r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3), "l"(gmm_l2_once()) : "memory");
}
GMM__DEVICE void gmm_tma_store_once(const CUtensorMap *map, uint32_t from, int32_t c0, int32_t c1, int32_t c2,
                                    int32_t c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint"
                 " [%0, {%2, %3, %4, %5}], [%1], %6;" : : "l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
                 "l"(gmm_l2_once()) : "memory");
}

/* Brings one box to the L2 by TMA. */
GMM__DEVICE void gmm_tma_prefetch(const CUtensorMap *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];"
                 : : "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

