/* ............................................................................. 14.11 MMA engine: grouped linear ... */

#ifdef __CUDACC__

/* Regions of the workspace. */
enum {
    GMM__MMA_OFFSETS, /* [G + 1] int64 */
    GMM__MMA_TILES,   /* [G + 1] int32 */
    GMM__MMA_TABLE,   /* [G] addresses each: tables that stood on the host */
    GMM__MMA_TABLE2,
    GMM__MMA_SCALES,
    GMM__MMA_PIECES,  /* bias gradient; the WGMMA engine's tables of many groups */
    GMM__WGMMA_A,     /* copies as 16-bit elements */
    GMM__WGMMA_B,
    GMM__WGMMA_FACTOR, /* [2][G] float: what multiplies the groups' sums, one after the other */
    GMM__WGMMA_UNITS,  /* [G + 1] int32: of 16 rows, of groups that are turned */
    GMM__WGMMA_ENDS    /* [G + 1] int64: 16 times these */
};

static gmm_status gmm__cuda_status(const gmm__call *call, cudaError_t e) {
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError(); /* reported here, so it is not found again by the next call */
    return gmm__fail(&call->ctx->error, GMM_E_CUDA, "%s: %s", call->function, cudaGetErrorString(e));
}

/* Room for the offsets, and for a table that stands on the host. */
static void gmm__mma_reserve_groups(const gmm__call *call, gmm__plan *plan) {
    const size_t groups = (size_t)call->groups.count;
    gmm__reserve(plan, GMM__MMA_OFFSETS, (groups + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__MMA_TILES, (groups + 1) * sizeof(int32_t));
}
static void gmm__mma_reserve_table(const gmm__call *call, gmm__plan *plan, int role, int part) {
    if (call->mat[role].dtype != GMM_NONE && (call->mat[role].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
        gmm__reserve(plan, part, (size_t)call->groups.count * sizeof(void *));
}

/* Whether a call's kernels may be launched early. Not where multiprocessors are to be left alone: no block of the next
   launch may wait on those. */
static int gmm__mma_pdl(const gmm__call *call) { return call->ctx->device.early && call->options.sm_limit == 0; }

/* Enqueues the offsets and tiles of a call. */
static gmm_status gmm__mma_offsets(const gmm__call *call, int64_t *offsets, int32_t *tiles, int32_t tile_rows,
                                   gmm_stream stream) {
    gmm_offsets_args args;
    memset(&args, 0, sizeof args);
    args.groups = call->groups;
    args.offsets = offsets;
    args.tiles = tiles;
    args.tile_rows = tile_rows;
    if (call->groups.on_host) { /* their offsets are known, and right: checked with the arguments */
        const int64_t words = (int64_t)call->groups.count + 1;
        enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        int64_t values[GMM_COPY_VALUES], first = 0, end = 0, i;
        uint32_t fault = 0;
        cudaError_t e = cudaStreamIsCapturing(stream, &capture);
        if (e == cudaSuccess && capture != cudaStreamCaptureStatusNone)
            return gmm__refuse(call, GMM_E_CAPTURE, "groups.on_host", "host sizes cannot be captured, since every "
                               "replay would use them; pass device sizes");
        for (; first < words && e == cudaSuccess; first += GMM_COPY_VALUES) {
            const int64_t count = words - first < GMM_COPY_VALUES ? words - first : (int64_t)GMM_COPY_VALUES;
            for (i = 0; i < count; i++) {
                if (first + i > 0)
                    end = gmm_split_end(end, gmm__split_value(&call->groups, first + i - 1), call->groups.form,
                                        call->groups.capacity, call->groups.row_align, &fault);
                values[i] = end;
            }
            e = gmm_launch_copy(offsets + first, values, count, stream);
        }
        if (e != cudaSuccess || !tiles) return gmm__cuda_status(call, e);
        args.groups.splits = offsets; /* the kernel writes back what it reads */
        args.groups.form = GMM_SPLIT_OFFSETS;
        args.groups.dtype = GMM_I64;
        args.groups.row_align = 0;
    }
    return gmm__cuda_status(call, gmm_launch_offsets(&args, gmm__mma_pdl(call), stream));
}

/* A call's operand as kernels address it. A host table is copied to `part` of the workspace. */
static cudaError_t gmm__mma_operand(const gmm__plan *plan, int role, int per_group, int part, gmm_kmat *out,
                                    gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    memset(out, 0, sizeof *out);
    out->dtype = m->dtype;
    out->data = m->data;
    out->table = m->table;
    out->ld = m->ld;
    out->stride = per_group ? m->group_stride * (gmm_dtype_bits(m->dtype) / 8) : 0;
    if (m->dtype == GMM_NONE || !m->table || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return cudaSuccess;
    out->table = (void *const *)gmm__part(plan, part);
    return gmm_launch_copy(gmm__part(plan, part), m->table, plan->call->groups.count, stream);
}

static float gmm__mma_beta(const gmm_grad *grad) {
    gmm_grad g = *grad;
    g.beta = NULL; /* device memory: the kernels read it */
    return gmm__grad_beta(&g, 0);
}

static gmm_status gmm__mma_launch_offsets(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_offsets(plan->call, (int64_t *)plan->call->output, NULL, 1, stream);
}

/* The factors of a product: A's lines are those of the result's rows, B's those of its columns. */
static int gmm__mma_factor_a(gmm_gemm_op op) { return op == gmm_gemm_fwd ? GMM__X_ : GMM__DY; }
static int gmm__mma_factor_b(gmm_gemm_op op) { return op == gmm_gemm_wgrad ? GMM__X_ : GMM__W; }

/* The kernel of a product of quantized operands. */
static int gmm__mma_plan_quantized(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int ra = gmm__mma_factor_a(op), rb = gmm__mma_factor_b(op);
    const gmm_mat *a = &call->mat[ra], *b = &call->mat[rb];
    const int64_t m = op == gmm_gemm_wgrad ? call->out : call->rows, n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t huge = INT32_MAX / 16, bound = op == gmm_gemm_wgrad
                                               ? call->groups.count * gmm__ceil_div(m, GMM_QGEMM_TILE_M)
                                               : call->rows / GMM_QGEMM_TILE_M + call->groups.count;
    const int mx = b->scaling == GMM_SCALING_MX32, f16 = a->dtype == GMM_F16;
    const int parts = gmm_block_along(b->scaling) == 128 || (mx && f16);
    const gmm_dtype dtype = parts || f16 || !gmm_block_along(b->scaling) ? GMM_F16 : GMM_BF16;
    const int32_t processors = call->ctx->device.processors;
    int64_t tiles_n;
    int32_t i;
    if (a->dtype == GMM_F32) return gmm__decline(plan, "multiplies f32 by no quantized weights");
    if (call->rows > huge || call->in > huge || call->out > huge)
        return gmm__decline(plan, "takes at most %lld rows and features of quantized operands", (long long)huge);
    plan->kernel = -1;
    for (i = 0; i < GMM_QGEMM_KERNELS; i++) {
        const gmm_qgemm_kernel *k = &gmm_qgemm_kernels[i];
        if (k->op == op && k->dtype == dtype && k->parts == parts &&
            k->a == (a->scaling == GMM_SCALING_MX32 && call->direction[ra] == GMM_COLUMNWISE) &&
            k->b == (mx && call->direction[rb] == GMM_COLUMNWISE)) plan->kernel = i;
    }
    if (plan->kernel < 0)
        return gmm__decline(plan, "has no kernel for %s %s times %s %s", gmm_dtype_name(a->dtype),
                            gmm_scaling_name(a->scaling), gmm_dtype_name(b->dtype), gmm_scaling_name(b->scaling));
    tiles_n = gmm__ceil_div(n, gmm_qgemm_kernels[plan->kernel].tile_cols);
    if (bound > INT32_MAX / tiles_n) return gmm__decline(plan, "has no kernel for so many tiles");
    plan->grid[0] = gmm__grid(processors, call->options.sm_limit, 1, bound * tiles_n);
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, op == gmm_gemm_wgrad ? GMM__DW : GMM__W, GMM__MMA_TABLE);
    if (op != gmm_gemm_wgrad) gmm__mma_reserve_table(call, plan, GMM__W, GMM__MMA_SCALES);
    if (op == gmm_gemm_fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_TABLE2);
    (void)snprintf(plan->note, sizeof plan->note, "%s by %s as %s, tile %d x %d, %d blocks", gmm_dtype_name(a->dtype),
                   gmm_dtype_name(b->dtype), gmm_dtype_name(dtype), (int)GMM_QGEMM_TILE_M,
                   (int)gmm_qgemm_kernels[plan->kernel].tile_cols, plan->grid[0]);
    return 1;
}

/* Chooses the kernel of a product: the one whose tiles take the fewest rounds of multiprocessor time, from what is
   known on the host. Every kernel gives the same bits. */
static int gmm__mma_plan_product(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int64_t G = call->groups.count, huge = INT32_MAX - 1024;
    const int64_t m = op == gmm_gemm_wgrad ? call->out : call->rows;
    const int64_t n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t hint = call->groups.rows_hint > 0 && call->groups.rows_hint < call->rows ? call->groups.rows_hint
                                                                                            : call->rows;
    const gmm_dtype dtype = call->mat[op == gmm_gemm_dgrad ? GMM__DY : GMM__X_].dtype;
    const int32_t processors = call->ctx->device.processors;
    const int32_t shared = call->ctx->device.shared;
    double best = 0.0;
    int32_t i;
    if (gmm__quantized(call)) return gmm__mma_plan_quantized(call, plan, op);
    if (call->rows > huge || call->in > huge || call->out > huge)
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)huge);
    plan->kernel = -1;
    for (i = 0; i < GMM_GEMM_KERNELS; i++) {
        const gmm_gemm_kernel *k = &gmm_gemm_kernels[i];
        const int64_t tiles_n = gmm__ceil_div(n, k->tile_cols), per_group = gmm__ceil_div(m, k->tile_rows);
        const int64_t bound = op == gmm_gemm_wgrad ? G * per_group : call->rows / k->tile_rows + G;
        const int64_t likely = op == gmm_gemm_wgrad ? bound : G * gmm__ceil_div(gmm__ceil_div(hint, G), k->tile_rows);
        double rounds;
        if (k->op != op || k->dtype != dtype || k->shared > shared) continue;
        if (bound > huge / tiles_n) continue;
        /* a tile costs its area plus its edges, which stand for moving the operands; more blocks share a processor */
        rounds = (double)gmm__ceil_div(likely * tiles_n, (int64_t)processors * k->blocks) * k->blocks *
                 ((double)k->tile_rows * k->tile_cols + 64.0 * (k->tile_rows + k->tile_cols));
        if (plan->kernel >= 0 && rounds >= best) continue;
        best = rounds;
        plan->kernel = i;
        plan->grid[0] = gmm__grid(processors, call->options.sm_limit, k->blocks, bound * tiles_n);
    }
    if (plan->kernel < 0) return gmm__decline(plan, "has no kernel for so many tiles of %s", gmm_dtype_name(dtype));
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, op == gmm_gemm_wgrad ? GMM__DW : GMM__W, GMM__MMA_TABLE);
    if (op == gmm_gemm_fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_TABLE2);
    (void)snprintf(plan->note, sizeof plan->note, "tile %d x %d, %d blocks",
                   (int)gmm_gemm_kernels[plan->kernel].tile_rows, (int)gmm_gemm_kernels[plan->kernel].tile_cols,
                   plan->grid[0]);
    return 1;
}

/* The arguments of a product but for offsets and tiles; copies tables that stand on the host. */
static gmm_status gmm__mma_product_args(const gmm__plan *plan, gmm_gemm_op op, gmm_gemm_args *args, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    const int fwd = op == gmm_gemm_fwd, wgrad = op == gmm_gemm_wgrad;
    cudaError_t e = gmm__mma_operand(plan, gmm__mma_factor_a(op), 0, 0, &args->a, stream);
    if (e == cudaSuccess) e = gmm__mma_operand(plan, gmm__mma_factor_b(op), !wgrad, GMM__MMA_TABLE, &args->b, stream);
    if (e == cudaSuccess)
        e = gmm__mma_operand(plan, fwd ? GMM__Y : wgrad ? GMM__DW : GMM__DX, wgrad, GMM__MMA_TABLE, &args->d, stream);
    if (e == cudaSuccess && fwd) e = gmm__mma_operand(plan, GMM__BIAS, 1, GMM__MMA_TABLE2, &args->bias, stream);
    args->groups = call->groups.count;
    args->capacity = call->rows;
    args->m = (int32_t)(wgrad ? call->out : call->rows);
    args->n = (int32_t)(fwd ? call->out : call->in);
    args->k = (int32_t)(fwd ? call->in : call->out);
    args->alpha = d->alpha;
    args->alpha_per_group = d->alpha_per_group;
    args->zero_tail = call->groups.tail == GMM_TAIL_ZERO;
    if (fwd) args->bias_scale = d->bias_scale;
    args->beta_all = d->y_add ? 1.0f : 0.0f;
    if (wgrad) {
        args->beta = call->grad[GMM__DW].beta;
        args->frozen = call->grad[GMM__DW].frozen;
        args->beta_all = gmm__mma_beta(&call->grad[GMM__DW]);
    }
    return gmm__cuda_status(call, e);
}

/* Launches it; `p` holds what is not of its factors, and the table of their elements. */
static gmm_status gmm__mma_launch_quantized(const gmm__plan *plan, gmm_gemm_op op, const gmm_gemm_args *p,
                                            gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int ra = gmm__mma_factor_a(op), rb = gmm__mma_factor_b(op), fwd = op == gmm_gemm_fwd;
    gmm_qgemm_args args;
    cudaError_t e = cudaSuccess;
    memset(&args, 0, sizeof args);
    args.p = *p;
    args.a = call->mat[ra];
    args.b = call->mat[rb];
    args.b.table = p->b.table;
    args.a_along = call->direction[ra];
    args.b_along = call->direction[rb];
    args.a_cols = (int32_t)(fwd ? call->in : call->out);
    args.b_cols = (int32_t)call->in;
    args.b_rows = (int32_t)call->out;
    args.k_round = args.b.hadamard && op == gmm_gemm_wgrad ? 16 : 1;
    args.block = args.b.scaling == GMM_SCALING_MX32 ? 32 : 128;
    if (args.b.scale_table && (args.b.flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) {
        args.b.scale_table = (void *const *)gmm__part(plan, GMM__MMA_SCALES);
        e = gmm_launch_copy(gmm__part(plan, GMM__MMA_SCALES), call->mat[rb].scale_table, call->groups.count, stream);
    }
    if (e == cudaSuccess) e = gmm_launch_qgemm(plan->kernel, plan->grid[0], &args, stream);
    return gmm__cuda_status(call, e);
}

static gmm_status gmm__mma_launch_product(const gmm__plan *plan, gmm_gemm_op op, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int quantized = gmm__quantized(call);
    gmm_gemm_args args;
    gmm_status s;

    memset(&args, 0, sizeof args);
    args.offsets = (const int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
    args.tiles = (const int32_t *)gmm__part(plan, GMM__MMA_TILES);
    s = gmm__mma_offsets(call, (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS),
                         (int32_t *)gmm__part(plan, GMM__MMA_TILES),
                         quantized ? (int32_t)GMM_QGEMM_TILE_M : gmm_gemm_kernels[plan->kernel].tile_rows, stream);
    if (s != GMM_OK || (s = gmm__mma_product_args(plan, op, &args, stream)) != GMM_OK) return s;
    if (quantized) return gmm__mma_launch_quantized(plan, op, &args, stream);
    return gmm__cuda_status(call, gmm_launch_gemm(plan->kernel, plan->grid[0], &args, stream));
}

static int gmm__mma_plan_linear_fwd(const gmm__call *call, gmm__plan *plan) {
    return gmm__mma_plan_product(call, plan, gmm_gemm_fwd);
}
static int gmm__mma_plan_linear_dgrad(const gmm__call *call, gmm__plan *plan) {
    return gmm__mma_plan_product(call, plan, gmm_gemm_dgrad);
}
static int gmm__mma_plan_linear_wgrad(const gmm__call *call, gmm__plan *plan) {
    return gmm__mma_plan_product(call, plan, gmm_gemm_wgrad);
}
static gmm_status gmm__mma_launch_linear_fwd(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_product(plan, gmm_gemm_fwd, stream);
}
static gmm_status gmm__mma_launch_linear_dgrad(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_product(plan, gmm_gemm_dgrad, stream);
}
static gmm_status gmm__mma_launch_linear_wgrad(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_product(plan, gmm_gemm_wgrad, stream);
}

static int gmm__mma_plan_linear_bgrad(const gmm__call *call, gmm__plan *plan) {
    const int64_t N = call->out, pieces = call->rows / GMM_BGRAD_ROWS + call->groups.count, huge = INT32_MAX - 1024;
    const int32_t processors = call->ctx->device.processors;
    int64_t size;
    if (call->rows > huge || N > huge || pieces > huge || !gmm__mul(pieces, N * (int64_t)sizeof(float), &size))
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)huge);
    plan->grid[0] = gmm__grid(processors, call->options.sm_limit, 8, INT32_MAX);
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, GMM__DB, GMM__MMA_TABLE);
    gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_TABLE2);
    if (call->mat[GMM__DB].dtype != GMM_NONE) gmm__reserve(plan, GMM__MMA_PIECES, (size_t)size);
    return 1;
}

static gmm_status gmm__mma_launch_linear_bgrad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    gmm_bgrad_args args;
    gmm_status s;
    cudaError_t e;

    memset(&args, 0, sizeof args);
    args.offsets = (const int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
    args.tiles = (const int32_t *)gmm__part(plan, GMM__MMA_TILES);
    s = gmm__mma_offsets(call, (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS),
                         (int32_t *)gmm__part(plan, GMM__MMA_TILES), GMM_BGRAD_ROWS, stream);
    if (s != GMM_OK) return s;
    e = gmm__mma_operand(plan, GMM__DY, 0, 0, &args.dy, stream);
    if (e == cudaSuccess) e = gmm__mma_operand(plan, GMM__DB, 1, GMM__MMA_TABLE, &args.db, stream);
    if (e == cudaSuccess) e = gmm__mma_operand(plan, GMM__BIAS, 1, GMM__MMA_TABLE2, &args.bias, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);

    if (args.db.dtype != GMM_NONE) {
        args.partials = (float *)gmm__part(plan, GMM__MMA_PIECES);
        args.beta = call->grad[GMM__DB].beta;
        args.frozen = call->grad[GMM__DB].frozen;
        args.beta_all = gmm__mma_beta(&call->grad[GMM__DB]);
    }
    args.groups = call->groups.count;
    args.n = (int32_t)call->out;
    args.capacity = call->rows;
    args.bias_scale = d->bias_scale;
    args.d_bias_scale = d->d_bias_scale;
    args.row_add = d->d_bias_scale_add;
    args.zero_tail = call->groups.tail == GMM_TAIL_ZERO;
    return gmm__cuda_status(call, gmm_launch_bgrad(args.dy.dtype, plan->grid[0], &args, stream));
}

#endif /* __CUDACC__ */

