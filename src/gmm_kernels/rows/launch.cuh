/* .................................................................................................... Launchers ... */

#if GMM__HOLDS(0)
/* Starts at most limits.max_ctas CTAs; kernels loop over their tasks, and results do not depend on the grid. Every
   kernel calls gmm_pdl_wait, but gmm_act_dprob gmm_pdl_wait_only. Those without dynamic shared memory have next to
   none, and 16 CTAs per multiprocessor. */
static GMM__UNUSED cudaError_t gmm__k_launch(const void *kernel, int64_t blocks, gmm__launch_limits limits,
                                             int32_t threads, size_t shared, const void *args, cudaStream_t stream) {
    if (blocks > limits.max_ctas) blocks = limits.max_ctas;
    if (blocks < 1) blocks = 1;
    return gmm_launch_pdl(kernel, limits.pdl, (unsigned)blocks, (unsigned)threads, shared,
                          shared ? 0 : GMM__SM_KIB(16, 0), args, stream);
}

/* For kernels whose tasks are `parts` parts of each of `rows` rows, one warp per task. */
static GMM__UNUSED cudaError_t gmm__k_launch_rows(const void *kernel, int64_t rows, int64_t parts,
                                                  gmm__launch_limits limits, const void *args, cudaStream_t stream) {
    if (rows <= 0 || parts <= 0) return cudaSuccess;
    if (rows > INT32_MAX || parts > INT32_MAX) return cudaErrorInvalidValue;
    return gmm__k_launch(kernel, (rows * parts - 1) / GMM__ELEM_WARPS + 1, limits, GMM__ELEM_BLOCK, 0, args, stream);
}

/* dtype of the precision instance that serves a view and the views before it, which have the dtype `dtype`; GMM_NONE
   selects the instance `any`. */
static GMM__UNUSED gmm_dtype gmm__k_common_dtype(gmm_dtype dtype, const gmm__view *m, int64_t cols) {
    if (!m->data) return dtype;
    return m->dtype == dtype && m->vec && cols % 8 == 0 ? dtype : GMM_NONE;
}

/* The kernels of each operation by precision, in the order of GMM__ELEM_PRECISIONS. One name a line: `make tags`. */
static const void *const gmm__act_fwd_kernels[] = {
    (const void *)gmm_act_fwd_bf16,
    GMM__IF_F16((const void *)gmm_act_fwd_f16,)
    (const void *)gmm_act_fwd_f32,
    (const void *)gmm_act_fwd_any
};
#ifndef GMM_NO_QUANT
static const void *const gmm__act_fwd_amax_kernels[] = {
    (const void *)gmm_act_fwd_amax_bf16,
    GMM__IF_F16((const void *)gmm_act_fwd_amax_f16,)
    (const void *)gmm_act_fwd_amax_f32,
    (const void *)gmm_act_fwd_amax_any
};
#endif
static const void *const gmm__act_bwd_kernels[] = {
    (const void *)gmm_act_bwd_bf16,
    GMM__IF_F16((const void *)gmm_act_bwd_f16,)
    (const void *)gmm_act_bwd_f32,
    (const void *)gmm_act_bwd_any
};
#ifndef GMM_NO_QUANT
static const void *const gmm__act_bwd_amax_kernels[] = {
    (const void *)gmm_act_bwd_amax_bf16,
    GMM__IF_F16((const void *)gmm_act_bwd_amax_f16,)
    (const void *)gmm_act_bwd_amax_f32,
    (const void *)gmm_act_bwd_amax_any
};
#endif
static const void *const gmm__unpermute_fwd_kernels[] = {
    (const void *)gmm_unpermute_fwd_bf16,
    GMM__IF_F16((const void *)gmm_unpermute_fwd_f16,)
    (const void *)gmm_unpermute_fwd_f32,
    (const void *)gmm_unpermute_fwd_any
};
static const void *const gmm__unpermute_bwd_kernels[] = {
    (const void *)gmm_unpermute_bwd_bf16,
    GMM__IF_F16((const void *)gmm_unpermute_bwd_f16,)
    (const void *)gmm_unpermute_bwd_f32,
    (const void *)gmm_unpermute_bwd_any
};
static const void *const gmm__unpermute_dots_kernels[] = {
    (const void *)gmm_unpermute_dots_bf16,
    GMM__IF_F16((const void *)gmm_unpermute_dots_f16,)
    (const void *)gmm_unpermute_dots_f32,
    (const void *)gmm_unpermute_dots_any
};

/* The kernel whose operands have the dtype `dtype`; GMM_NONE selects the instance `any`. */
static GMM__UNUSED const void *gmm__k_precision_kernel(const void *const kernels[], gmm_dtype dtype) {
#define GMM__X(tag, value) value,
    static const gmm_dtype DTYPES[] = { GMM__ELEM_PRECISIONS(GMM__X) };
#undef GMM__X
    int i = 0;
    while (DTYPES[i] != dtype && DTYPES[i] != GMM_NONE) i++;
    return kernels[i];
}

/* The kernels of each operation by copy unit, in the order of GMM__ELEM_UNITS. */
static const void *const gmm__copy_kernels[] = {
    (const void *)gmm_copy_b16,
    (const void *)gmm_copy_b4,
    (const void *)gmm_copy_b2,
    (const void *)gmm_copy_b1
};
static const void *const gmm__permute_rows_kernels[] = {
    (const void *)gmm_permute_rows_b16,
    (const void *)gmm_permute_rows_b4,
    (const void *)gmm_permute_rows_b2,
    (const void *)gmm_permute_rows_b1
};
static const void *const gmm__permute_tokens_kernels[] = {
    (const void *)gmm_permute_tokens_b16,
    (const void *)gmm_permute_tokens_b4,
    (const void *)gmm_permute_tokens_b2,
    (const void *)gmm_permute_tokens_b1
};
static const void *const gmm__pad_kernels[] = {
    (const void *)gmm_pad_b16,
    (const void *)gmm_pad_b4,
    (const void *)gmm_pad_b2,
    (const void *)gmm_pad_b1
};
static const void *const gmm__glu_rows_kernels[] = {
    (const void *)gmm_glu_rows_b16,
    (const void *)gmm_glu_rows_b4,
    (const void *)gmm_glu_rows_b2,
    (const void *)gmm_glu_rows_b1
};
static const void *const gmm__glu_columns_kernels[] = {
    (const void *)gmm_glu_columns_b16,
    (const void *)gmm_glu_columns_b4,
    (const void *)gmm_glu_columns_b2,
    (const void *)gmm_glu_columns_b1
};

/* The kernel of the widest unit whose size divides `bits`, the bitwise OR of addresses and byte counts. *bytes receives
   the size. */
static GMM__UNUSED const void *gmm__k_unit_kernel(const void *const kernels[], uintptr_t bits, int64_t *bytes) {
#define GMM__X(tag, type, size) size,
    static const int32_t SIZES[] = { GMM__ELEM_UNITS(GMM__X) };
#undef GMM__X
    int i = 0;
    while (bits % (uintptr_t)SIZES[i] != 0) i++;
    *bytes = SIZES[i];
    return kernels[i];
}

static GMM__UNUSED int64_t gmm__k_bytes(gmm_dtype dtype) { return gmm_dtype_bits(dtype) / 8; }
static GMM__UNUSED uintptr_t gmm__k_alignment(const gmm__view *m) {
    return (uintptr_t)m->data | (uintptr_t)(m->ld * gmm__k_bytes(m->dtype));
}
static GMM__UNUSED int64_t gmm__k_parts(int64_t cols) { return (cols + GMM__ELEM_SPAN - 1) / GMM__ELEM_SPAN; }
static GMM__UNUSED int64_t gmm__k_copy_spans(int64_t units) { return (units + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN; }

static GMM__UNUSED int32_t gmm__k_act_layout(int32_t gated, int32_t interleave) {
    return !gated || interleave % 8 == 0 ? GMM__GLU_SPLIT : interleave == 1 ? GMM__GLU_PAIRS : GMM__GLU_ELEMENT;
}

static GMM__UNUSED cudaError_t gmm__k_act_fwd(const gmm__act_args *args, gmm__launch_limits limits,
                                              cudaStream_t stream) {
    const void *const *kernels = GMM__IF_QUANT(args->amax ? gmm__act_fwd_amax_kernels :) gmm__act_fwd_kernels;
    gmm__act_args a = *args;
    gmm_dtype dtype = a.x.dtype;
    int64_t spans; /* spans that a warp processes together */
    a.layout = gmm__k_act_layout(a.gated, a.interleave);
    dtype = gmm__k_common_dtype(gmm__k_common_dtype(dtype, &a.x, a.ffn), &a.y, a.ffn);
    if (a.layout == GMM__GLU_ELEMENT) dtype = GMM_NONE;
    a.wide = a.x.dtype == GMM_F32 || a.y.dtype == GMM_F32;
    spans = dtype == GMM_BF16 || dtype == GMM_F16 ? 2 : 1;
    return gmm__k_launch_rows(gmm__k_precision_kernel(kernels, dtype), (a.rows - 1) / spans + 1, gmm__k_parts(a.ffn),
                              limits, &a, stream);
}

static GMM__UNUSED cudaError_t gmm__k_act_bwd(const gmm__act_args *args, gmm__launch_limits limits,
                                              cudaStream_t stream) {
    const void *const *kernels = GMM__IF_QUANT(args->amax ? gmm__act_bwd_amax_kernels :) gmm__act_bwd_kernels;
    gmm__act_args a = *args;
    gmm_dtype dtype = a.x.dtype;
    a.layout = gmm__k_act_layout(a.gated, a.interleave);
    dtype = gmm__k_common_dtype(gmm__k_common_dtype(dtype, &a.x, a.ffn), &a.dy, a.ffn);
    dtype = gmm__k_common_dtype(gmm__k_common_dtype(dtype, &a.dx, a.ffn), &a.y, a.ffn);
    if (a.layout == GMM__GLU_ELEMENT) dtype = GMM_NONE;
    /* determines the order of sums, so it must not depend on outputs, which may be absent */
    a.wide = a.x.dtype == GMM_F32 || a.dy.dtype == GMM_F32;
    return gmm__k_launch_rows(gmm__k_precision_kernel(kernels, dtype), a.rows,
                              a.dprob ? (int64_t)gmm__act_warps_per_row(a.ffn) : gmm__k_parts(a.ffn), limits, &a,
                              stream);
}

static GMM__UNUSED cudaError_t gmm__k_dprob(const gmm__dprob_args *a, gmm__launch_limits limits, cudaStream_t stream) {
    if (a->rows == 0) return cudaSuccess;
    return gmm__k_launch((const void *)gmm_act_dprob, (a->rows - 1) / GMM__ELEM_BLOCK + 1, limits, GMM__ELEM_BLOCK, 0,
                         a, stream);
}

static GMM__UNUSED size_t gmm__map_counts_bytes(int64_t slots, int32_t experts) {
    return (size_t)((slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK) * (size_t)experts * 4;
}

static GMM__UNUSED cudaError_t gmm__k_permute_map(const gmm__map_args *a, gmm__launch_limits limits,
                                                  cudaStream_t stream) {
    const size_t histogram = (size_t)a->experts * 4, shared = histogram <= GMM__ELEM_SHARED ? histogram : 0;
    const int64_t chunks = (a->slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK;
    cudaError_t status = cudaSuccess;
    if (a->slot_of) status = gmm_launch_fill(a->slot_of, UINT32_MAX, a->capacity, limits.sm_limit, limits.pdl, stream);
    if (status == cudaSuccess && !shared && chunks > 0)
        status = gmm_launch_fill(a->counts, 0, chunks * a->experts, limits.sm_limit, limits.pdl, stream);
    if (status == cudaSuccess && chunks > 0)
        status = gmm__k_launch((const void *)gmm_permute_count, chunks, limits, GMM__ELEM_BLOCK, shared, a,
                               stream);
    if (status == cudaSuccess)
        status = gmm__k_launch((const void *)gmm_permute_scan, (a->experts - 1) / GMM__ELEM_WARPS + 1, limits,
                               GMM__ELEM_BLOCK, 0, a, stream);
    if (status == cudaSuccess)
        status = gmm__k_launch((const void *)gmm_permute_starts, 1, limits, 32, 0, a, stream);
    if (status == cudaSuccess && chunks > 0 && (a->row_of || a->slot_of))
        status = gmm__k_launch((const void *)gmm_permute_assign, chunks, limits, 32, shared, a, stream);
    return status;
}

/* Alignment of a copy between two views, and conversion of strides and columns into units of `bytes`. */
static GMM__UNUSED uintptr_t gmm__k_copy_alignment(const gmm__view *src, const gmm__view *dst, int64_t cols) {
    return gmm__k_alignment(src) | gmm__k_alignment(dst) | (uintptr_t)(cols * gmm__k_bytes(src->dtype));
}
static GMM__UNUSED void gmm__k_convert_to_units(gmm__view *src, gmm__view *dst, int64_t *cols, int64_t bytes) {
    const int64_t size = gmm__k_bytes(src->dtype);
    src->ld = src->ld * size / bytes;
    dst->ld = dst->ld * size / bytes;
    *cols = *cols * size / bytes;
}

/* dst[r] = src[token of r]; row_probs. With row_of each token's row is read once; with one expert per token that
   holds for gmm_permute_rows as well. */
static GMM__UNUSED cudaError_t gmm__k_permute_rows(const gmm__permute_args *args, gmm__launch_limits limits,
                                                   cudaStream_t stream) {
    gmm__permute_args a = *args;
    const uintptr_t bits = gmm__k_copy_alignment(&a.src, &a.dst, a.hidden);
    const int tokens = a.row_of && a.topk > 1;
    int64_t bytes, rows = a.capacity, segments;
    const void *kernel = gmm__k_unit_kernel(tokens ? gmm__permute_tokens_kernels : gmm__permute_rows_kernels, bits,
                                            &bytes);
    gmm__k_convert_to_units(&a.src, &a.dst, &a.hidden, bytes);
    segments = gmm__k_copy_spans(a.hidden);
    if (tokens) rows = a.tokens > a.capacity / 32 / segments ? a.tokens : a.capacity / 32 / segments + 1;
    return gmm__k_launch_rows(kernel, a.capacity > 0 ? rows : 0, segments, limits, &a, stream);
}

/* Selects the precision instance, and the column layout of lanes (`wide`). */
static GMM__UNUSED gmm_dtype gmm__k_precision(gmm__permute_args *a) {
    a->wide = a->src.dtype == GMM_F32 || a->dst.dtype == GMM_F32;
    return gmm__k_common_dtype(gmm__k_common_dtype(a->src.dtype, &a->src, a->hidden), &a->dst, a->hidden);
}

/* dst[t] = sum over slots of (probs) src[row]. */
static GMM__UNUSED cudaError_t gmm__k_unpermute_fwd(const gmm__permute_args *args, gmm__launch_limits limits,
                                                    cudaStream_t stream) {
    gmm__permute_args a = *args;
    const gmm_dtype dtype = gmm__k_precision(&a);
    return gmm__k_launch_rows(gmm__k_precision_kernel(gmm__unpermute_fwd_kernels, dtype), a.tokens,
                              gmm__k_parts(a.hidden), limits, &a, stream);
}

/* dst[r] = (probs) src[token of r]. */
static GMM__UNUSED cudaError_t gmm__k_unpermute_bwd(const gmm__permute_args *args, gmm__launch_limits limits,
                                                    cudaStream_t stream) {
    gmm__permute_args a = *args;
    const gmm_dtype dtype = gmm__k_precision(&a);
    return gmm__k_launch_rows(gmm__k_precision_kernel(gmm__unpermute_bwd_kernels, dtype), a.capacity,
                              (gmm__k_parts(a.hidden) + 1) / 2, limits, &a, stream);
}

/* dprobs[slot] = src[token] . dst[row]; both are read. */
static GMM__UNUSED cudaError_t gmm__k_unpermute_dots(const gmm__permute_args *args, gmm__launch_limits limits,
                                                     cudaStream_t stream) {
    gmm__permute_args a = *args;
    const gmm_dtype dtype = gmm__k_precision(&a);
    return gmm__k_launch_rows(gmm__k_precision_kernel(gmm__unpermute_dots_kernels, dtype), a.tokens, a.topk, limits, &a,
                              stream);
}

static GMM__UNUSED cudaError_t gmm__k_gather_probs(const gmm__permute_args *a, gmm__launch_limits limits,
                                                   cudaStream_t stream) {
    const int64_t slots = a->tokens * a->topk;
    if (slots == 0) return cudaSuccess;
    return gmm__k_launch((const void *)gmm_gather_probs, (slots + GMM__ELEM_BLOCK - 1) / GMM__ELEM_BLOCK,
                         limits, GMM__ELEM_BLOCK, 0, a, stream);
}

static GMM__UNUSED cudaError_t gmm__k_gather_row_probs(const gmm__permute_args *a, gmm__launch_limits limits,
                                                       cudaStream_t stream) {
    if (a->capacity == 0) return cudaSuccess;
    return gmm__k_launch((const void *)gmm_gather_row_probs, (a->capacity + GMM__ELEM_BLOCK - 1) / GMM__ELEM_BLOCK,
                         limits, GMM__ELEM_BLOCK, 0, a, stream);
}

/* Row j of group g of dst is row j of group g of src, or zeros where src has no such row. */
static GMM__UNUSED cudaError_t gmm__k_pad(const gmm__pad_args *args, gmm__launch_limits limits, cudaStream_t stream) {
    gmm__pad_args a = *args;
    int64_t bytes;
    const void *kernel = gmm__k_unit_kernel(gmm__pad_kernels, gmm__k_copy_alignment(&a.src, &a.dst, a.cols), &bytes);
    gmm__k_convert_to_units(&a.src, &a.dst, &a.cols, bytes);
    /* sizes and faults are written even if there are no rows */
    return gmm__k_launch_rows(kernel, a.rows > 0 ? a.rows : 1, gmm__k_copy_spans(a.cols), limits, &a, stream);
}

/* Permutes the 2 ffn rows of each of `count` matrices. Matrices addressed by device tables are aligned to their
   dtype only. */
static GMM__UNUSED cudaError_t gmm__k_glu_rows(const gmm__glu_args *args, gmm__launch_limits limits,
                                               cudaStream_t stream) {
    gmm__glu_args a = *args;
    const int64_t size = gmm__k_bytes(a.src.dtype);
    uintptr_t bits = gmm__k_copy_alignment(&a.src, &a.dst, a.cols);
    int64_t bytes;
    const void *kernel;
    if (!a.src_table) bits |= (uintptr_t)(a.src_stride * size);
    if (!a.dst_table) bits |= (uintptr_t)(a.dst_stride * size);
    if (a.src_table || a.dst_table) bits |= (uintptr_t)size;
    if (size == 8) bits |= 4;
    kernel = gmm__k_unit_kernel(gmm__glu_rows_kernels, bits, &bytes);
    gmm__k_convert_to_units(&a.src, &a.dst, &a.cols, bytes);
    a.src_stride = a.src_stride * size / bytes;
    a.dst_stride = a.dst_stride * size / bytes;
    return gmm__k_launch_rows(kernel, a.count * 2 * a.ffn, gmm__k_copy_spans(a.cols), limits, &a, stream);
}

/* Permutes the 2 ffn columns of one matrix of `count` rows. */
static GMM__UNUSED cudaError_t gmm__k_glu_columns(const gmm__glu_args *args, gmm__launch_limits limits,
                                                  cudaStream_t stream) {
    gmm__glu_args a = *args;
    const int64_t size = gmm__k_bytes(a.src.dtype);
    int64_t bytes;
    const void *kernel = gmm__k_unit_kernel(gmm__glu_columns_kernels,
                                            gmm__k_copy_alignment(&a.src, &a.dst, a.block), &bytes);
    if (a.ffn * size % bytes != 0) return cudaErrorInvalidValue; /* cannot happen, since block divides ffn */
    a.ffn = a.ffn * size / bytes;
    gmm__k_convert_to_units(&a.src, &a.dst, &a.block, bytes);
    return gmm__k_launch_rows(kernel, a.count, gmm__k_copy_spans(2 * a.ffn), limits, &a, stream);
}

/* Treats matrices without gaps between rows as one long row. */
static GMM__UNUSED void gmm__k_flatten(const gmm__view *a, const gmm__view *b, int64_t *rows, int64_t *cols) {
    if (*rows > 1 && a->ld == *cols && b->ld == *cols) {
        *cols *= *rows;
        *rows = 1;
    }
}

/* Most columns of one launch, since kernels count columns in 32 bits. A multiple of GMM__ELEM_SPAN. */
enum { GMM__ELEM_MAX_COLS = 1 << 30 };

static GMM__UNUSED void *gmm__k_column(const gmm__view *m, int64_t col) {
    return (char *)m->data + col * gmm__k_bytes(m->dtype);
}

static GMM__UNUSED cudaError_t gmm__k_accumulate(const gmm__accumulate_args *args, gmm__launch_limits limits,
                                                 cudaStream_t stream) {
    gmm__accumulate_args a = *args;
    cudaError_t status = cudaSuccess;
    int64_t remaining;
    int32_t j, sm_limited;
    gmm__k_flatten(&a.x, &a.y, &a.rows, &a.cols);
    sm_limited = limits.sm_limit > 0 && a.rows == 1 && a.cols % 8 == 0 && !a.start.data && a.x.vec && a.y.vec &&
             a.y.dtype == GMM_F32 && (a.x.dtype == GMM_F32 || a.x.dtype == GMM_BF16);
    if (sm_limited && limits.max_ctas > limits.sm_limit) limits.max_ctas = limits.sm_limit;
    for (remaining = a.cols; remaining > 0 && status == cudaSuccess; remaining -= a.cols) {
        if (a.cols > GMM__ELEM_MAX_COLS) a.cols = GMM__ELEM_MAX_COLS;
        if (a.cols > remaining) a.cols = remaining;
        if (sm_limited)
            status = gmm__k_launch(a.x.dtype == GMM_F32 ? (const void *)gmm_accumulate_sm_limited_f32
                                                        : (const void *)gmm_accumulate_sm_limited_bf16,
                                   (a.cols / 8 - 1) / GMM__SUM_BLOCK + 1, limits, GMM__SUM_BLOCK, 0, &a, stream);
        else
            status = gmm__k_launch_rows((const void *)gmm_accumulate_rows, a.rows, (gmm__k_parts(a.cols) + 1) / 2,
                                        limits, &a, stream);
        for (j = 0; j < a.count; j++) a.addends[j] += a.cols * gmm__k_bytes(a.x.dtype);
        a.y.data = gmm__k_column(&a.y, a.cols);
        if (a.start.data) a.start.data = gmm__k_column(&a.start, a.cols);
    }
    return status;
}

static GMM__UNUSED cudaError_t gmm__k_convert(const gmm__convert_args *args, gmm__launch_limits limits,
                                              cudaStream_t stream) {
    gmm__convert_args a = *args;
    cudaError_t status = cudaSuccess;
    int64_t remaining;
    gmm__k_flatten(&a.src, &a.dst, &a.rows, &a.cols);
    if (a.src.dtype == a.dst.dtype) {
        gmm__copy_args copy;
        int64_t bytes;
        const void *kernel = gmm__k_unit_kernel(gmm__copy_kernels,
                                                gmm__k_copy_alignment(&a.src, &a.dst, a.cols), &bytes);
        gmm__k_convert_to_units(&a.src, &a.dst, &a.cols, bytes);
        copy.src = a.src.data;
        copy.dst = a.dst.data;
        copy.rows = a.rows;
        copy.cols = a.cols;
        copy.src_ld = a.src.ld;
        copy.dst_ld = a.dst.ld;
        return gmm__k_launch_rows(kernel, a.rows, gmm__k_copy_spans(a.cols), limits, &copy, stream);
    }
    for (remaining = a.cols; remaining > 0 && status == cudaSuccess; remaining -= a.cols) {
        if (a.cols > GMM__ELEM_MAX_COLS) a.cols = GMM__ELEM_MAX_COLS;
        if (a.cols > remaining) a.cols = remaining;
        status = gmm__k_launch_rows((const void *)gmm_convert_rows, a.rows, (gmm__k_parts(a.cols) + 1) / 2, limits, &a,
                                    stream);
        a.src.data = gmm__k_column(&a.src, a.cols);
        a.dst.data = gmm__k_column(&a.dst, a.cols);
    }
    return status;
}
#endif /* GMM__HOLDS(0) */

