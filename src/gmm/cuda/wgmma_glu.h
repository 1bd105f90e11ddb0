/* The gated activation in FC1's product of an MLP, and its gradient in FC2's dgrad: when the WGMMA engine takes them,
   and how its kernels get them. */

#ifdef __CUDACC__

/* Whether the product is a dgrad, which may compute the activation's gradient. */
static int gmm__wgmma_is_dgrad(const gmm__call *call) { return call->op == GMM_OP_LINEAR_DGRAD; }
/* The operation of the kernels that compute a 16-bit product and the activation, or its gradient. */
static gmm_gemm_op gmm__wgmma_fused_op(const gmm__call *call) {
    return gmm__wgmma_is_dgrad(call) ? gmm_gemm_dglu : gmm_gemm_glu;
}

/* Clocks of a product alone, or with the activation or its gradient (`fused`); 0: no tile serves it. `copies` as in
   gmm__wgmma_choose. */
static double gmm__wgmma_product_clocks(const gmm__call *call, int fused, int copies) {
    const gmm_gemm_op op = gmm__wgmma_op(call->op);
    const int32_t processors = call->ctx->device.processors;
    double clocks = 0.0;
#ifndef GMM_NO_QUANT
    if (call->fused.product_cast) {
        if (gmm__wgmma_choose_fp8(call, op, call->mat[GMM__X_].dtype, GMM_FP8_1D2D, fused, processors, &clocks) < 0)
            return 0.0;
        return clocks;
    }
#endif
    if (gmm__wgmma_choose(call, op, fused ? gmm__wgmma_fused_op(call) : op, call->mat[gmm__cuda_role_d(op)].dtype, 0,
                          processors, copies, &clocks) < 0)
        return 0.0;
    return clocks;
}

/* Rows and columns of the tile of glu and dglu products. */
enum { GMM__WGMMA_GLU_M = 16 * gmm_sm90_m16_176x128, GMM__WGMMA_GLU_N = gmm_sm90_tile_n_176x128 };

/* The product alone gets narrower tiles where each group fits one tile, so that its last wave is full. A glu product
   keeps 128 columns, and a dglu product that gets 64 leaves half of the threads of its epilogue idle. Prices do not
   know this, so that of the fused product is multiplied by the result. 0: one wave of tiles with a long contraction,
   which would leave multiprocessors without work. */
static double gmm__wgmma_glu_width_factor(const gmm__call *call) {
    const int32_t processors = call->ctx->device.processors;
    const gmm__wgmma_shape s = gmm__wgmma_shape_of(call, gmm__wgmma_op(call->op), processors);
    const gmm__wgmma_tiling wide = gmm__wgmma_tiling_of(&s, GMM__WGMMA_GLU_M, GMM__WGMMA_GLU_N, processors, 0);
    const gmm__wgmma_tiling filling = gmm__wgmma_tiling_of(&s, GMM__WGMMA_GLU_M, GMM__WGMMA_GLU_N, processors, 1);
    const double tiles_n = (double)filling.tiles_n < (double)s.n / 16.0 ? (double)filling.tiles_n : (double)s.n / 16.0;
    if (wide.waves <= 1 && s.contraction > 1024) return 0.0;
    return 1.0 + (gmm__wgmma_is_dgrad(call) ? gmm__wgmma_dglu_width : gmm__wgmma_glu_width) *
                     (tiles_n / (double)wide.tiles_n - 1.0);
}

/* Bytes per row that the kernel of the activation, or of its gradient, reads and writes. Forward reads 2 ffn columns of
   2 bytes and writes ffn columns of 2 bytes, or of one where it quantizes them. Backward reads z and dh, and writes dz
   and, where it is wanted, h. */
static int64_t gmm__wgmma_act_bytes(const gmm__call *call) {
    const gmm_activation *d = call->fused.product_act;
    if (gmm__wgmma_is_dgrad(call)) return call->in * (6 + 4 * (d->dx != NULL) + 2 * (d->y != NULL));
    return call->out / 2 * (call->fused.product_cast ? 5 : 6);
}
/* Whether one launch is expected to be faster than the product and the kernel of the activation, or of its gradient,
   unless the caller demands it. */
static int gmm__wgmma_fused_act_pays(const gmm__call *call, gmm__plan *plan, int copies) {
    const int gradient = gmm__wgmma_is_dgrad(call);
    const double bytes = (double)(gmm__cuda_rows_per_group(call) * call->groups.count * gmm__wgmma_act_bytes(call));
    double act, product, fused, width;
    if (call->options.fuse == GMM_FUSE_ALWAYS) return 1;
    if (call->options.tile) return gmm__decline(plan, "fuses no activation where options.tile demands a tile");
    width = call->fused.product_cast ? 1.0 : gmm__wgmma_glu_width_factor(call);
    if (width == 0.0) return gmm__decline(plan, "expects narrower tiles, which fuse no activation, to be faster");
    /* in backward the launch of gmm_act_dprob takes the place of that of the activation */
    act = gradient ? bytes / gmm__wgmma_act_bwd_rate : bytes / gmm__wgmma_act_rate + gmm__wgmma_act_fixed;
    product = gmm__wgmma_product_clocks(call, 0, copies);
    fused = width * gmm__wgmma_product_clocks(call, 1, copies);
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

/* The columns of the activation's inputs as kernels take them: 0: halves. */
static int32_t gmm__wgmma_dglu_interleave(const gmm__call *call) {
    return call->act.interleave == call->in ? 0 : call->act.interleave;
}
/* Whether a dglu product serves call->fused.product_act, and is expected to be faster or demanded. The matrices of the
   activation are packed, with 2 ffn and ffn columns. */
static int gmm__wgmma_serves_dglu(const gmm__call *call, gmm__plan *plan, int copies) {
    const gmm_activation *d = call->fused.product_act;
    const int64_t ffn = call->in;
    if (!gmm_act_gated(call->act.kind)) return gmm__decline(plan, "fuses no gradient of an ungated act");
    if (ffn % 64 || ffn > GMM__MAX_EXTENT / 2)
        return gmm__decline(plan, "fuses no gradient of ffn %lld", (long long)ffn);
    if (gmm__wgmma_dglu_interleave(call) % 8)
        return gmm__decline(plan, "fuses no gradient of interleave %d", (int)call->act.interleave);
    if (d->x->dtype != call->mat[GMM__DY].dtype || (uintptr_t)d->x->data % 16)
        return gmm__decline(plan, "fuses no gradient with z of %s at %p: must be of dy's dtype, at a multiple of 16 "
                            "bytes", gmm_dtype_name(d->x->dtype), d->x->data);
    return gmm__wgmma_fused_act_pays(call, plan, copies);
}
/* Reserves the parts of dprob, wanted or not, so that a query without the address of dprob plans as the call does. */
static void gmm__wgmma_reserve_dots(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, GMM__WGMMA_DOTS,
                 (size_t)(gmm__ceil_div(call->in, GMM_ACT_DOT_COLS) * call->rows) * sizeof(float));
}

#ifndef GMM_NO_QUANT
/* The same of a product by a recipe, which quantizes the activation's result. The kernel relies on the formats, and on
   z in BF16 with aligned rows, which TMA stores. */
static int gmm__wgmma_serves_fp8_glu(const gmm__call *call, gmm__plan *plan) {
    const gmm_mat *x = &call->mat[GMM__X_], *w = &call->mat[GMM__W], *z = &call->mat[GMM__Y];
    const gmm_format *f = call->fused.product_cast;
    const int64_t ffn = call->out / 2, block = call->act.interleave;
    if (gmm__wgmma_is_dgrad(call)) return gmm__decline(plan, "fuses no gradient with quantized operands");
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
    glu->drops_d = call->fused.drops_d;
    glu->eps = call->fused.product_cast->eps;
    glu->pow2 = call->fused.product_cast->pow2;
}
#endif /* GMM_NO_QUANT */

/* Enqueues zeros behind the last group of a packed result, unless it has no address. */
static cudaError_t gmm__wgmma_fused_tail(const gmm__plan *plan, const gmm_sm90_args *args, const gmm_kmat *result,
                                         cudaStream_t stream) {
    gmm_tail_args tail;
    if (!args->p.zero_tail || !result->data) return cudaSuccess;
    memset(&tail, 0, sizeof tail);
    tail.d = *result;
    tail.groups = args->groups;
    tail.n = (int32_t)result->ld;
    return gmm_launch_tail(plan->grid[0], gmm__cuda_pdl(plan->call), &tail, stream);
}
/* A packed matrix of `cols` columns and of D's dtype; NULL: without an address. */
static gmm_kmat gmm__wgmma_fused_matrix(const gmm_sm90_args *args, const gmm_mat *m, int64_t cols) {
    gmm_kmat matrix = args->p.d;
    matrix.data = m ? m->data : NULL;
    matrix.ld = cols;
    return matrix;
}

/* Describes the activation of a glu product to its kernel, and enqueues zeros behind the last group of its result. */
static cudaError_t gmm__wgmma_glu_args(const gmm__plan *plan, gmm_sm90_args *args, cudaStream_t stream) {
    const gmm__call *call = plan->call;
    gmm_sm90_glu *glu = &args->glu;
    glu->h = gmm__wgmma_fused_matrix(args, call->fused.product_act->y, call->out / 2);
    glu->prob = call->fused.product_act->prob;
    glu->kind = call->act.kind;
    glu->coef = gmm_act_coefficients(&call->act);
    glu->block = call->act.interleave ? call->act.interleave : args->p.n / 2;
    glu->drops_d = call->fused.drops_d;
    return gmm__wgmma_fused_tail(plan, args, &glu->h, stream);
}

/* Describes the activation of a dglu product to its kernel, and enqueues zeros behind the last group of its results. */
static cudaError_t gmm__wgmma_dglu_args(const gmm__plan *plan, gmm_sm90_args *args, cudaStream_t stream) {
    const gmm__call *call = plan->call;
    const gmm_activation *d = call->fused.product_act;
    gmm_sm90_dglu *dglu = &args->dglu;
    cudaError_t e;
    dglu->z = gmm__wgmma_fused_matrix(args, d->x, 2 * call->in);
    dglu->dz = gmm__wgmma_fused_matrix(args, d->dx, 2 * call->in);
    dglu->h = gmm__wgmma_fused_matrix(args, d->y, call->in);
    dglu->prob = d->prob;
    dglu->dots = d->dprob ? (float *)gmm__region(plan, GMM__WGMMA_DOTS) : NULL;
    dglu->kind = call->act.kind;
    dglu->coef = gmm_act_coefficients(&call->act);
    dglu->interleave = gmm__wgmma_dglu_interleave(call);
    dglu->linear = dglu->interleave ? dglu->interleave : args->p.n;
    dglu->capacity = call->rows;
    e = gmm__wgmma_fused_tail(plan, args, &dglu->dz, stream);
    return e == cudaSuccess ? gmm__wgmma_fused_tail(plan, args, &dglu->h, stream) : e;
}
/* Enqueues dprob behind a dglu product that has written its parts (args->dglu.dots; NULL for all other products). The
   steps of an MLP have row offsets in device memory. */
static cudaError_t gmm__wgmma_dglu_dprob(const gmm__plan *plan, const gmm_sm90_args *args, cudaStream_t stream) {
    const gmm__call *call = plan->call;
    gmm__dprob_args dprob;
    if (!args->dglu.dots) return cudaSuccess;
    memset(&dprob, 0, sizeof dprob);
    dprob.dots = args->dglu.dots;
    dprob.valid_rows = (const int64_t *)call->groups.splits + call->groups.count;
    dprob.rows = call->rows;
    dprob.ffn = args->p.n;
    dprob.tail_zero = args->p.zero_tail;
    dprob.dprob = call->fused.product_act->dprob;
    return gmm__k_dprob(&dprob, gmm__mma_launch_limits(call, 8), stream);
}

#endif /* __CUDACC__ */
