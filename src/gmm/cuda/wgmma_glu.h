/* The gated activation in FC1's product of an MLP: when the WGMMA engine takes it, and how its kernel gets it. */

#ifdef __CUDACC__

/* Clocks of FC1 as a product alone or as a glu product; 0: no tile serves it. `copies` as in gmm__wgmma_choose. */
static double gmm__wgmma_fc1_clocks(const gmm__call *call, int glu, int copies) {
    const int32_t processors = call->ctx->device.processors;
    double clocks = 0.0;
#ifndef GMM_NO_QUANT
    if (call->fused.product_cast) {
        if (gmm__wgmma_choose_fp8(call, gmm_gemm_fwd, call->mat[GMM__X_].dtype, GMM_FP8_1D2D, glu, processors,
                                  &clocks) < 0)
            return 0.0;
        return clocks;
    }
#endif
    if (gmm__wgmma_choose(call, gmm_gemm_fwd, glu ? gmm_gemm_glu : gmm_gemm_fwd, call->mat[GMM__Y].dtype, 0, processors,
                          copies, &clocks) < 0)
        return 0.0;
    return clocks;
}

/* Tiles of a 16-bit glu product are 176 x 128 and cannot be narrowed; those of FC1 alone are, where a group fits one,
   until they fill the last wave, which its price does not count. What the price of the glu product is multiplied by
   instead. 0: a long contraction would leave multiprocessors without work. */
static double gmm__wgmma_glu_width_factor(const gmm__call *call) {
    const int32_t processors = call->ctx->device.processors;
    const gmm__wgmma_shape s = gmm__wgmma_shape_of(call, gmm_gemm_fwd, processors);
    const gmm__wgmma_tiling wide = gmm__wgmma_tiling_of(&s, 176, 128, processors, 0);
    const gmm__wgmma_tiling filling = gmm__wgmma_tiling_of(&s, 176, 128, processors, 1);
    const double tiles_n = (double)filling.tiles_n < (double)s.n / 16.0 ? (double)filling.tiles_n : (double)s.n / 16.0;
    if (wide.waves <= 1 && s.contraction > 1024) return 0.0;
    return 1.0 + gmm__wgmma_glu_width * (tiles_n / (double)wide.tiles_n - 1.0);
}

/* Whether one launch is expected to be faster than FC1 and the kernel of its activation, unless the caller demands it.
   The kernel reads 2 ffn columns of 2 bytes and writes ffn columns of 2 bytes, or of one where it quantizes them. */
static int gmm__wgmma_fused_act_pays(const gmm__call *call, gmm__plan *plan, int copies) {
    const int64_t bytes = call->out / 2 * (call->fused.product_cast ? 5 : 6);
    double act, product, fused, width;
    if (call->options.fuse == GMM_FUSE_ALWAYS) return 1;
    if (call->options.tile) return gmm__decline(plan, "fuses no activation where options.tile demands a tile");
    width = call->fused.product_cast ? 1.0 : gmm__wgmma_glu_width_factor(call);
    if (width == 0.0) return gmm__decline(plan, "expects narrower tiles, which fuse no activation, to be faster");
    act = (double)(gmm__cuda_rows_per_group(call) * call->groups.count * bytes) / gmm__wgmma_act_rate +
          gmm__wgmma_act_fixed;
    product = gmm__wgmma_fc1_clocks(call, 0, copies);
    fused = width * gmm__wgmma_fc1_clocks(call, 1, copies);
    if (product > 0.0 && fused >= gmm__wgmma_margin * (product + act))
        return gmm__decline(plan, "expects %s to be faster alone",
                            call->fused.product_cast ? "act and cast" : "the act");
    return 1;
}

/* Whether a glu product serves call->fused.product_act, and is expected to be faster or demanded. */
static int gmm__wgmma_serves_glu(const gmm__call *call, gmm__plan *plan, int copies) {
    const gmm_mat *z = &call->mat[GMM__Y];
    const int64_t ffn = call->out / 2, block = call->act.interleave;
    if (!gmm_act_gated(call->act.kind)) return gmm__decline(plan, "fuses no activation that is not gated");
    if (ffn % 64) return gmm__decline(plan, "fuses no activation of ffn %lld", (long long)ffn);
    if (block % 64 && block != 8 && block != 16 && block != 32)
        return gmm__decline(plan, "fuses no activation of interleave %lld", (long long)block);
    if (z->dtype != call->mat[GMM__X_].dtype || z->ld % 8 || (uintptr_t)z->data % 16)
        return gmm__decline(plan, "fuses no activation with z of %s and ld %lld: must be of x's dtype, with rows at "
                            "multiples of 16 bytes", gmm_dtype_name(z->dtype), (long long)z->ld);
    return gmm__wgmma_fused_act_pays(call, plan, copies);
}

#ifndef GMM_NO_QUANT
/* The same of a product by a recipe, which quantizes the activation's result. The kernel relies on the formats, and on
   z in BF16 with aligned rows, which TMA stores. */
static int gmm__wgmma_serves_fp8_glu(const gmm__call *call, gmm__plan *plan) {
    const gmm_mat *x = &call->mat[GMM__X_], *w = &call->mat[GMM__W], *z = &call->mat[GMM__Y];
    const gmm_format *f = call->fused.product_cast;
    const int64_t ffn = call->out / 2, block = call->act.interleave;
    if (!f || f->dtype != GMM_E4M3 || f->scaling != GMM_SCALING_1X128 || f->order != GMM_SCALES_COMPACT)
        return gmm__decline(plan, "fuses no activation with a cast but to e4m3 by 1x128");
    if (x->dtype != GMM_E4M3 || x->scaling != GMM_SCALING_1X128 || w->scaling != GMM_SCALING_128X128)
        return gmm__decline(plan, "fuses no activation with %s weights", gmm_scaling_name(w->scaling));
    if (!gmm_act_gated(call->act.kind)) return gmm__decline(plan, "fuses no activation that is not gated");
    if (ffn % 128) return gmm__decline(plan, "fuses no activation and cast of ffn %lld", (long long)ffn);
    if (block % 128)
        return gmm__decline(plan, "fuses no activation and cast of interleave %lld", (long long)block);
    if (z->dtype != GMM_BF16 || z->ld % 8 || (uintptr_t)z->data % 16)
        return gmm__decline(plan, "fuses no activation with z of %s and ld %lld: must be bf16, with rows at multiples "
                            "of 16 bytes", gmm_dtype_name(z->dtype), (long long)z->ld);
    return gmm__wgmma_fused_act_pays(call, plan, 0);
}

/* Describes the activation of an FP8 glu product to its kernel. */
static void gmm__wgmma_fp8_glu_args(const gmm__call *call, gmm_fp8_args *args) {
    gmm_fp8_glu *glu = &args->glu;
    args->p.n /= 2;
    glu->h = *call->fused.product_act->y;
    glu->h.ld = args->p.n; /* the copy is packed */
    glu->prob = call->fused.product_act->prob;
    glu->kind = call->act.kind;
    glu->coef = gmm_act_coefficients(&call->act);
    glu->block = call->act.interleave ? call->act.interleave : args->p.n;
    glu->drops_d = call->fused.drops_preact;
    glu->eps = call->fused.product_cast->eps;
    glu->pow2 = call->fused.product_cast->pow2;
}
#endif /* GMM_NO_QUANT */

/* Describes the activation of a glu product to its kernel, and enqueues zeros behind the last group of its result. */
static cudaError_t gmm__wgmma_glu_args(const gmm__plan *plan, gmm_sm90_args *args, cudaStream_t stream) {
    const gmm__call *call = plan->call;
    gmm_sm90_glu *glu = &args->glu;
    gmm_tail_args tail;
    glu->h = args->p.d;
    glu->h.data = call->fused.product_act->y->data;
    glu->h.ld = call->out / 2; /* y is packed */
    glu->prob = call->fused.product_act->prob;
    glu->kind = call->act.kind;
    glu->coef = gmm_act_coefficients(&call->act);
    glu->block = call->act.interleave ? call->act.interleave : args->p.n / 2;
    glu->drops_d = call->fused.drops_preact;
    if (!args->p.zero_tail) return cudaSuccess;
    memset(&tail, 0, sizeof tail);
    tail.d = glu->h;
    tail.groups = args->groups;
    tail.n = args->p.n / 2;
    return gmm_launch_tail(plan->grid[0], gmm__cuda_pdl(plan->call), &tail, stream);
}

#endif /* __CUDACC__ */
