/* ............................................................................. Body: one wgmma instruction ... */
#elif GMM__BODY == GMM__BODY_WGMMA
#define GMM__TAG GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__WGMMA_TYPES GMM__COLUMN(3, GMM__ROW)
#define GMM__WGMMA_MAJOR GMM__COLUMN(4, GMM__ROW)
/* One wgmma of M = 64, N = 8 n8 and 32 bytes of K: d = A B + d, or d = A B where `scale_d` is 0. `desc_a` and
   `desc_b` are the descriptors of the operands in shared memory. */
GMM__DEVICE void GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), GMM__OP)(const int n8, float *d, uint64_t desc_a,
                                                                                uint64_t desc_b,
                                                                                const int scale_d = 1) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    switch (n8) {
#define GMM__X(e, u, n, da, db, c) \
    case e: asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " GMM__WGMMA_SCALE_D(c) ", 0;\n" \
                         " wgmma.mma_async.sync.aligned.m64n" n GMM__WGMMA_TYPES \
                         " {" GMM__T##u "}, " da ", " db ", p, 1, 1" GMM__WGMMA_MAJOR ";\n}" \
                         : GMM__V##u : "l"(desc_a), "l"(desc_b), "r"(scale_d)); break;
    GMM_WGMMA_LIST(GMM__X)
#undef GMM__X
    default: break;
    }
#endif
}
#undef GMM__TAG
#undef GMM__OP
#undef GMM__WGMMA_TYPES
#undef GMM__WGMMA_MAJOR
#undef GMM__ROW

