/* Eight activations at a time, which the row kernels, the casts and the epilogue of glu products compute. */

/* Computes eight activations and their derivatives. `gated_only`: a constant, 1 where the kind is always gated. The
   switch is outside of the loop, so that each case is straight-line code. SwiGLU without a limit, which most models
   have, takes 16 instructions per element instead of 25. */
GMM__DEVICE void gmm__act_x8(gmm_act_kind kind, const int gated_only, gmm_act_coef c, const float a[8],
                             const float b[8], float f[8], float da[8], float db[8]) {
    int32_t i;
    if (kind == GMM_ACT_SWIGLU && gmm_f32_bits(c.limit) == 0x7F800000u) {
#pragma unroll
        for (i = 0; i < 8; i++) f[i] = gmm__act_point(GMM_GATE_SILU, 1, 0, c, a[i], b[i], &da[i], &db[i]);
        return;
    }
    switch (kind) {
#define GMM__X(name, value, text, gate, gated, alpha, betas) \
    case name: \
        if (gated_only && !(gated)) break; \
        _Pragma("unroll") for (i = 0; i < 8; i++) f[i] = gmm_act_point(gate, gated, c, a[i], b[i], &da[i], &db[i]); \
        break;
        GMM_ACT_LIST(GMM__X)
#undef GMM__X
    default: break;
    }
}

/* dprob of a row is the sum of parts of so many columns. A quarter of a warp adds up a part, a lane 8 columns of it. */
enum { GMM_ACT_DOT_COLS = 64 };
GMM__DEVICE float gmm__quarter_warp_sum(float v) {
    int32_t d;
#pragma unroll
    for (d = 1; d < 8; d <<= 1) v = __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFFu, v, d));
    return v;
}
