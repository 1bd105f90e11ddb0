#if GMM__HOLDS(0)
/* Warps per CTA and CTAs of the routing kernels, whose warps have arrays of `floats`. *shared is 0 where the arrays do
   not fit into shared memory and are in `scratch`. */
static GMM__UNUSED int32_t gmm__route_warps(int64_t floats, size_t *shared) {
    int32_t warps = GMM__ELEM_WARPS;
    while (warps > 1 && warps * floats * 4 > GMM__ELEM_SHARED) warps /= 2;
    *shared = (size_t)warps * (size_t)floats * 4;
    if (*shared <= GMM__ELEM_SHARED) return warps;
    *shared = 0;
    return GMM__ELEM_WARPS;
}
static GMM__UNUSED int64_t gmm__route_blocks(int64_t tasks, int32_t warps, size_t shared, int64_t max_blocks) {
    const int64_t blocks = (tasks + warps - 1) / warps;
    if (!shared) max_blocks = (max_blocks - 1) / GMM__ELEM_PER_SM + 1; /* each warp has an array in the workspace */
    return blocks < max_blocks ? blocks : max_blocks;
}
/* Scratch of every routing kernel: none has more floats. */
static GMM__UNUSED size_t gmm__route_scratch_bytes(int64_t tokens, int32_t experts, int32_t groups,
                                                   int64_t max_blocks) {
    size_t shared;
    const int64_t floats = gmm__route_topk_floats(experts, groups, 1);
    const int32_t warps = gmm__route_warps(floats, &shared);
    return shared ? 0 : (size_t)gmm__route_blocks(tokens, warps, 0, max_blocks) * (size_t)warps * (size_t)floats * 4;
}
/* A launch of gmm_route_topk. A CTA that counts in shared memory ends with an atomic per expert, 32 of them in one
   instruction. So CTAs have many warps, and are about as many as run at a time (shared memory, which bounds them for
   many experts, is not considered). Where there are not many slots, these are counted one by one in global memory. */
typedef struct gmm__route_grid {
    const void *kernel;
    int64_t blocks;
    int32_t warps, count_in_cta;
    size_t shared;
} gmm__route_grid;

/* The multiprocessors of a launch, and the CTAs of `warps` warps that it has on each: with sm_limit, where max_ctas is
   that limit, one. */
static GMM__UNUSED int64_t gmm__route_processors(gmm__launch_limits limits) {
    return limits.sm_limit > 0 ? limits.max_ctas : (limits.max_ctas - 1) / GMM__ELEM_PER_SM + 1;
}
static GMM__UNUSED int32_t gmm__route_per_sm(gmm__launch_limits limits, int32_t warps) {
    return limits.sm_limit > 0 ? 1 : GMM__ROUTE_PER_SM * GMM__ROUTE_BLOCK / 32 / warps;
}
/* Tokens that a warp takes together where no loss fixes their number: the least number with which all warps of the
   grid run at a time, at most GMM__ROUTE_CHUNK. */
static GMM__UNUSED uint32_t gmm__route_chunk(const gmm__route_args *a, gmm__launch_limits limits) {
    const int32_t cta_warps = GMM__ROUTE_BLOCK / 32;
    const int64_t warps = gmm__route_processors(limits) * gmm__route_per_sm(limits, cta_warps) * cta_warps;
    const int64_t tokens = (a->tokens - 1) / warps + 1;
    return tokens < GMM__ROUTE_CHUNK ? (uint32_t)tokens : (uint32_t)GMM__ROUTE_CHUNK;
}
static GMM__UNUSED gmm__route_grid gmm__route_topk_grid(const gmm__route_args *a, gmm__launch_limits limits) {
    const int64_t tasks = a->chunks, processors = gmm__route_processors(limits);
    const int64_t floats = gmm__route_topk_floats(a->experts, a->groups, a->sums != NULL);
    int64_t bytes, most;
    gmm__route_grid grid;
    grid.warps = tasks < GMM__ROUTE_BLOCK / 32 * processors ? GMM__ELEM_WARPS : GMM__ROUTE_BLOCK / 32;
    while (grid.warps > 1 && (grid.warps * floats + a->experts) * 4 > GMM__ELEM_SHARED) grid.warps /= 2;
    bytes = (grid.warps * floats + a->experts) * 4;
    most = processors * gmm__route_per_sm(limits, grid.warps);
    grid.blocks = (tasks + grid.warps - 1) / grid.warps;
    if (grid.blocks > most) grid.blocks = most;
    grid.kernel = (const void *)gmm_route_topk;
    grid.shared = (size_t)bytes;
    grid.count_in_cta = a->counts && bytes <= GMM__ELEM_SHARED &&
                        grid.blocks * a->experts <= 4 * a->tokens * a->topk;
    if (grid.count_in_cta) return grid;
    grid.warps = gmm__route_warps(floats, &grid.shared);
    if (!grid.shared) grid.kernel = (const void *)gmm_route_topk_scratch;
    grid.blocks = gmm__route_blocks(tasks, grid.warps, grid.shared, limits.max_ctas);
    return grid;
}
/* Bytes of the partial sums of all levels of the reduction. */
static GMM__UNUSED size_t gmm__route_sums_bytes(int64_t tokens, int32_t experts, int32_t sequences) {
    int64_t rows = (tokens / sequences + GMM__ROUTE_CHUNK - 1) / GMM__ROUTE_CHUNK, total_rows = rows;
    while (rows > 1) {
        rows = (rows + GMM__ROUTE_FOLD - 1) / GMM__ROUTE_FOLD;
        total_rows += rows;
    }
    return (size_t)(total_rows * sequences) * (size_t)(experts + (int64_t)1) * 4;
}

/* Adds up the partial sums of each of `batch` sequences, and makes a->sums point to the results. */
static GMM__UNUSED cudaError_t gmm__k_route_fold(gmm__route_args *a, int64_t batch, gmm__launch_limits limits,
                                                 cudaStream_t stream) {
    int64_t rows = (a->tokens / batch + GMM__ROUTE_CHUNK - 1) / GMM__ROUTE_CHUNK;
    cudaError_t status = cudaSuccess;
    while (status == cudaSuccess && rows > 1) {
        gmm__fold_args fold;
        fold.in = a->sums;
        fold.out = a->sums + batch * rows * (a->experts + (int64_t)1);
        fold.rows = rows;
        fold.cols = a->experts + (int64_t)1;
        fold.batch = batch;
        rows = (rows + GMM__ROUTE_FOLD - 1) / GMM__ROUTE_FOLD;
        status = gmm__k_launch((const void *)gmm_route_fold, batch * rows * ((fold.cols + 31) / 32), limits,
                               GMM__ELEM_BLOCK, 0, &fold, stream);
        a->sums = fold.out;
    }
    return status;
}

/* The number of tokens that are no padding, where there is padding. */
static GMM__UNUSED cudaError_t gmm__k_route_valid(const gmm__route_args *a, gmm__launch_limits limits,
                                                  cudaStream_t stream) {
    const int64_t blocks = (a->tokens + GMM__ELEM_BLOCK - 1) / GMM__ELEM_BLOCK;
    cudaError_t status;
    if (!a->padding) return cudaSuccess;
    status = gmm_launch_fill(a->valid, 0, a->sequences, limits.sm_limit, limits.pdl, stream);
    if (status != cudaSuccess || a->tokens == 0) return status;
    return gmm__k_launch((const void *)gmm_route_valid, blocks < limits.max_ctas ? blocks : limits.max_ctas, limits,
                         GMM__ELEM_BLOCK, 0, a, stream);
}

/* Sinkhorn's multipliers of experts. */
static GMM__UNUSED cudaError_t gmm__k_sinkhorn(const gmm__route_args *args, gmm__launch_limits limits,
                                               cudaStream_t stream) {
    const int64_t chunks = (args->tokens + GMM__ROUTE_CHUNK - 1) / GMM__ROUTE_CHUNK;
    gmm__route_args a = *args;
    size_t shared;
    const int32_t warps = gmm__route_warps(a.experts, &shared);
    cudaError_t status;
    int32_t i;
    if (shared) a.scratch = NULL;
    a.sums = NULL;
    status = gmm__k_launch((const void *)gmm_route_balance, 1, limits, 32, 0, &a, stream);
    for (i = 0; i < a.iterations && status == cudaSuccess; i++) {
        a.sums = args->sums;
        status = gmm__k_launch((const void *)gmm_route_sinkhorn,
                               gmm__route_blocks(chunks, warps, shared, limits.max_ctas), limits, warps * 32, shared,
                               &a, stream);
        if (status == cudaSuccess) status = gmm__k_route_fold(&a, 1, limits, stream);
        if (status == cudaSuccess)
            status = gmm__k_launch((const void *)gmm_route_balance, 1, limits, 32, 0, &a, stream);
    }
    return status;
}

static GMM__UNUSED cudaError_t gmm__k_topk_fwd(const gmm__route_args *args, int losses, gmm__launch_limits limits,
                                               cudaStream_t stream) {
    gmm__route_args a = *args;
    cudaError_t status = cudaSuccess;
    if (a.counts) status = gmm_launch_fill(a.counts, 0, a.experts, limits.sm_limit, limits.pdl, stream);
    if (status == cudaSuccess && a.sequence_counts)
        status = gmm_launch_fill(a.sequence_counts, 0, (int64_t)a.sequences * a.experts, limits.sm_limit, limits.pdl,
                                 stream);
    if (status == cudaSuccess) status = gmm__k_route_valid(&a, limits, stream);
    if (status == cudaSuccess && a.tokens > 0 && a.multipliers) status = gmm__k_sinkhorn(&a, limits, stream);
    if (!losses || a.tokens == 0) a.sums = NULL;
    if (status == cudaSuccess && a.tokens > 0) {
        gmm__route_grid grid;
        a.softmax = !a.sigmoid || (a.sums && a.z_loss) || a.multipliers;
        a.values = a.expert_bias || a.multipliers || a.groups > 1;
        a.length = (uint32_t)a.tokens / (uint32_t)a.sequences;
        a.chunk = a.sums ? (uint32_t)GMM__ROUTE_CHUNK : gmm__route_chunk(&a, limits);
        a.sequence_chunks = (a.length - 1) / a.chunk + 1;
        a.chunks = a.sequence_chunks * (uint32_t)a.sequences;
        grid = gmm__route_topk_grid(&a, limits);
        a.count_in_cta = grid.count_in_cta;
        status = gmm__k_launch(grid.kernel, grid.blocks, limits, grid.warps * 32, grid.shared, &a, stream);
    }
    if (status == cudaSuccess && a.sums) status = gmm__k_route_fold(&a, a.sequences, limits, stream);
    if (status == cudaSuccess && (a.offsets || a.aux_loss || a.z_loss || a.total_counts))
        status = gmm__k_launch((const void *)gmm_route_finish, 1, limits, 32, 0, &a, stream);
    return status;
}

static GMM__UNUSED cudaError_t gmm__k_topk_bwd(const gmm__route_args *args, gmm__launch_limits limits,
                                               cudaStream_t stream) {
    gmm__route_args a = *args;
    size_t shared;
    const int32_t warps = gmm__route_warps(gmm__route_gradient_floats(a.experts), &shared);
    cudaError_t status;
    if (a.tokens == 0) return cudaSuccess;
    status = gmm__k_route_valid(&a, limits, stream);
    if (status != cudaSuccess) return status;
    return gmm__k_launch(shared ? (const void *)gmm_route_gradient : (const void *)gmm_route_gradient_scratch,
                         gmm__route_blocks(a.tokens, warps, shared, limits.max_ctas), limits,
                         warps * 32, shared, &a, stream);
}

/* `offsets` are the prefix sums of the counts. */
static GMM__UNUSED cudaError_t gmm__k_route_dense(const gmm__dense_args *a, int32_t *offsets,
                                                  gmm__launch_limits limits, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    if (a->counts) status = gmm_launch_fill(a->counts, 0, a->experts, limits.sm_limit, limits.pdl, stream);
    if (status == cudaSuccess && a->tokens > 0)
        status = gmm__k_launch((const void *)gmm_route_dense,
                               gmm__route_blocks(a->tokens, GMM__ELEM_WARPS, 1, limits.max_ctas), limits,
                               GMM__ELEM_BLOCK, 0, a, stream);
    if (status == cudaSuccess && offsets) {
        gmm__route_args finish;
        memset(&finish, 0, sizeof finish);
        finish.experts = a->experts;
        finish.sequences = 1;
        finish.counts = a->counts;
        finish.offsets = offsets;
        status = gmm__k_launch((const void *)gmm_route_finish, 1, limits, 32, 0, &finish, stream);
    }
    return status;
}

static GMM__UNUSED cudaError_t gmm__k_expert_bias(const gmm__bias_args *a, gmm__launch_limits limits,
                                                  cudaStream_t stream) {
    return gmm__k_launch((const void *)gmm_route_bias, a->layers, limits, 32, 0, a, stream);
}
#endif /* GMM__HOLDS(0) */

#endif /* GMM__GEMM_REST_DONE: opened at the end of hopper/schedule.cuh */

