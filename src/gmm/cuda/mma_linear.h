
#ifdef __CUDACC__

/* Plans and launches of the MMA engine's linear layers, and its gmm_offsets. */

static gmm_status gmm__mma_launch_offsets(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm_offsets_args args;
    int k;
    memset(&args, 0, sizeof args);
    args.offsets = (int64_t *)call->output;
    for (k = 0; k < GMM__TILE_KINDS; k++)
        if (call->tile_kinds >> k & 1) args.tiles[k] = call->split_tiles + k * (call->groups.count + (int64_t)1);
    memcpy(args.tile_rows, gmm__tile_rows, sizeof args.tile_rows);
    return gmm__cuda_enqueue_split(call, &args, stream);
}

#ifndef GMM_NO_QUANT
/* Declines operands whose scaling the MMA kernels do not read or write: every one that is not listed here. */
static int gmm__mma_takes_scalings(const gmm__call *call, gmm__plan *plan) {
    int i;
    for (i = 0; i < GMM__ROLES; i++) {
        const gmm_mat *m = &call->mat[i];
        if (m->dtype == GMM_NONE) continue;
        switch (m->scaling) {
        case GMM_SCALING_NONE:
        case GMM_SCALING_TENSOR:
        case GMM_SCALING_ROW:
        case GMM_SCALING_1X128:
        case GMM_SCALING_128X128:
        case GMM_SCALING_MX32:
        case GMM_SCALING_NV16: break;
        default: return gmm__decline(plan, "has no kernel for scaling %s", gmm_scaling_name(m->scaling));
        }
    }
    return 1;
}

/* Plans a product of quantized operands: kernel, grid, workspace. */
static int gmm__mma_plan_quantized(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int role_a = gmm__cuda_role_a(op), role_b = gmm__cuda_role_b(op);
    const gmm_mat *a = &call->mat[role_a], *b = &call->mat[role_b];
    const int64_t m = op == gmm_gemm_wgrad ? call->out : call->rows, n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t max_extent = INT32_MAX / 16 / 128 * 128; /* 16 bytes times a padded extent fit 32 bits */
    const int64_t max_tiles = op == gmm_gemm_wgrad ? call->groups.count * gmm__ceil_div(m, GMM_QGEMM_TILE_M)
                                                   : call->rows / GMM_QGEMM_TILE_M + call->groups.count;
    const int mx = b->scaling == GMM_SCALING_MX32, f16 = a->dtype == GMM_F16;
    /* columns of the kernel table, by the rules above gmm_qgemm_args: whether scales multiply the partial sums of
       blocks, and the dtype that mma reads */
    const int block_scaled = gmm_block_along(b->scaling) == 128 || (mx && f16);
    const gmm_dtype dtype = block_scaled || f16 || !gmm_block_along(b->scaling) ? GMM_F16 : GMM_BF16;
    const int32_t processors = call->ctx->device.processors;
    int64_t tiles_n;
    int32_t i;
    if (!gmm__mma_takes_scalings(call, plan)) return 0;
    if (a->dtype == GMM_F32) return gmm__decline(plan, "multiplies f32 by no quantized weights");
    if (call->rows > max_extent || call->in > max_extent || call->out > max_extent)
        return gmm__decline(plan, "takes at most %lld rows and features of quantized operands", (long long)max_extent);
    plan->kernel = -1;
    for (i = 0; i < GMM_QGEMM_KERNELS; i++) {
        const gmm_qgemm_kernel *k = &gmm_qgemm_kernels[i];
        if (k->op == op && k->dtype == dtype && k->block_scaled == block_scaled &&
            k->mn_major_a == (a->scaling == GMM_SCALING_MX32 && call->direction[role_a] == GMM_COLUMNWISE) &&
            k->mn_major_b == (mx && call->direction[role_b] == GMM_COLUMNWISE))
            plan->kernel = i;
    }
    if (plan->kernel < 0)
        return gmm__decline(plan, "has no kernel for %s %s times %s %s", gmm_dtype_name(a->dtype),
                            gmm_scaling_name(a->scaling), gmm_dtype_name(b->dtype), gmm_scaling_name(b->scaling));
    plan->kernel_name = gmm_qgemm_kernels[plan->kernel].name;
    tiles_n = gmm__ceil_div(n, gmm_qgemm_kernels[plan->kernel].tile_cols);
    if (max_tiles > INT32_MAX / tiles_n)
        return gmm__decline(plan, "takes at most %d tiles, not %lld rows of tiles with %lld each", INT32_MAX,
                            (long long)max_tiles, (long long)tiles_n);
    plan->grid[0] = gmm__grid(processors, call->options.sm_limit, 1, max_tiles * tiles_n);
    gmm__cuda_reserve_product(call, plan, op);
    (void)snprintf(plan->note, sizeof plan->note, "%s by %s as %s, tile %d x %d, %d blocks", gmm_dtype_name(a->dtype),
                   gmm_dtype_name(b->dtype), gmm_dtype_name(dtype), (int)GMM_QGEMM_TILE_M,
                   (int)gmm_qgemm_kernels[plan->kernel].tile_cols, plan->grid[0]);
    return gmm__cuda_plan_gather(call, plan, op);
}
#endif /* GMM_NO_QUANT */

/* Plans a product. Of the kernels, which all give the same bits, it chooses the one whose waves of tiles are estimated
   to cost least if all groups have the average size. */
static int gmm__mma_plan_product(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int64_t G = call->groups.count, max_extent = GMM__MAX_EXTENT;
    const int64_t m = op == gmm_gemm_wgrad ? call->out : call->rows;
    const int64_t n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t rows = gmm__cuda_expected_rows(call);
    const gmm_dtype dtype = call->mat[op == gmm_gemm_dgrad ? GMM__DY : GMM__X_].dtype;
    const int32_t processors = call->ctx->device.processors;
    const int32_t shared = call->ctx->device.shared;
    double best = 0.0;
    int32_t i;
#ifndef GMM_NO_QUANT
    if (gmm__quantized(call)) return gmm__mma_plan_quantized(call, plan, op);
#endif
    if (call->rows > max_extent || call->in > max_extent || call->out > max_extent)
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)max_extent);
    plan->kernel = -1;
    for (i = 0; i < GMM_GEMM_KERNELS; i++) {
        const gmm_gemm_kernel *k = &gmm_gemm_kernels[i];
        const int64_t tiles_n = gmm__ceil_div(n, k->tile_cols), per_group = gmm__ceil_div(m, k->tile_rows);
        const int64_t max_tiles = op == gmm_gemm_wgrad ? G * per_group : call->rows / k->tile_rows + G;
        const int64_t tiles = op == gmm_gemm_wgrad ? max_tiles
                                                   : G * gmm__ceil_div(gmm__ceil_div(rows, G), k->tile_rows);
        double cost;
        if (k->op != op || k->dtype != dtype || k->shared > shared) continue;
        if (max_tiles > max_extent / tiles_n) continue;
        /* waves of tiles, times the tiles that a multiprocessor computes at a time, times the cost of a tile: its area
           for the products, and 64 times its edges for loading the operands */
        cost = (double)gmm__ceil_div(tiles * tiles_n, (int64_t)processors * k->blocks) * k->blocks *
               ((double)k->tile_rows * k->tile_cols + 64.0 * (k->tile_rows + k->tile_cols));
        if (plan->kernel >= 0 && cost >= best) continue;
        best = cost;
        plan->kernel = i;
        plan->kernel_name = k->name;
        plan->grid[0] = gmm__grid(processors, call->options.sm_limit, k->blocks, max_tiles * tiles_n);
    }
    if (plan->kernel < 0) return gmm__decline(plan, "has no kernel for so many tiles of %s", gmm_dtype_name(dtype));
    gmm__cuda_reserve_product(call, plan, op);
    (void)snprintf(plan->note, sizeof plan->note, "tile %d x %d, %d blocks",
                   (int)gmm_gemm_kernels[plan->kernel].tile_rows, (int)gmm_gemm_kernels[plan->kernel].tile_cols,
                   plan->grid[0]);
    return gmm__cuda_plan_gather(call, plan, op);
}

#ifndef GMM_NO_QUANT
/* Launches a product of quantized operands; `p` holds the arguments that products of floats have too, and the device
   table of the weights. */
static gmm_status gmm__mma_launch_quantized(const gmm__plan *plan, gmm_gemm_op op, const gmm_gemm_args *p,
                                            gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int role_a = gmm__cuda_role_a(op), role_b = gmm__cuda_role_b(op), fwd = op == gmm_gemm_fwd;
    gmm_qgemm_args args;
    cudaError_t e = cudaSuccess;
    memset(&args, 0, sizeof args);
    args.p = *p;
    args.a = call->mat[role_a];
    if (gmm__cuda_index_of(call, role_a)) { /* the copy of gathered floats */
        args.a.data = p->a.data;
        args.a.ld = p->a.ld;
    }
    args.b = call->mat[role_b];
    args.b.table = p->b.table;
    args.a_along = call->direction[role_a];
    args.b_along = call->direction[role_b];
    args.a_cols = (int32_t)(fwd ? call->in : call->out);
    args.b_cols = (int32_t)call->in;
    args.b_rows = (int32_t)call->out;
    args.k_round = args.b.hadamard && op == gmm_gemm_wgrad ? 16 : 1;
    args.block = args.b.scaling == GMM_SCALING_MX32 ? 32 : 128;
    e = gmm__cuda_device_table(plan, &call->mat[role_b], call->mat[role_b].scale_table, call->groups.count,
                               GMM__SCALE_TABLE, &args.b.scale_table, stream);
    if (e == cudaSuccess) e = gmm_launch_qgemm(plan->kernel, plan->grid[0], &args, stream);
    return gmm__cuda_status(call, e);
}
#endif /* GMM_NO_QUANT */

/* Enqueues the offsets, the copies of host tables and the product. */
static gmm_status gmm__mma_launch_product(const gmm__plan *plan, gmm_gemm_op op, gmm_stream stream) {
    const gmm__call *call = plan->call;
    int32_t tile_rows;
    gmm_gemm_args args;
    gmm_groups groups;
    gmm_status s;

    tile_rows = gmm__quantized(call) ? (int32_t)GMM_QGEMM_TILE_M : gmm_gemm_kernels[plan->kernel].tile_rows;
    memset(&args, 0, sizeof args);
    args.offsets = (const int64_t *)gmm__region(plan, GMM__ROW_OFFSETS);
    args.tiles = (const int32_t *)gmm__region(plan, GMM__TILE_SUMS);
    s = gmm__cuda_enqueue_offsets(call, (int64_t *)gmm__region(plan, GMM__ROW_OFFSETS),
                                  (int32_t *)gmm__region(plan, GMM__TILE_SUMS), tile_rows, stream);
    if (s != GMM_OK || (s = gmm__cuda_product_args(plan, op, &args, stream)) != GMM_OK) return s;
    groups = gmm__cuda_groups_at(&call->groups, args.offsets);
    if ((s = gmm__cuda_status(call, gmm__cuda_gather(plan, op, &args, &groups, stream))) != GMM_OK) return s;
#ifndef GMM_NO_QUANT
    if (gmm__quantized(call)) return gmm__mma_launch_quantized(plan, op, &args, stream);
#endif
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

/* Reserves the partial sums of a bias gradient of n columns, unless a cast computes them. Returns 0 where they are too
   many for the kernels. */
static int gmm__mma_reserve_partials(const gmm__call *call, gmm__plan *plan, int64_t n, int region) {
    const int64_t strips = gmm__group_strips(&call->groups);
    const int64_t max_extent = GMM__MAX_EXTENT;
    int64_t size;
    if (call->rows > max_extent || n > max_extent || strips > max_extent ||
        !gmm__mul(strips, n * (int64_t)sizeof(float), &size))
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)max_extent);
    if (call->mat[GMM__DB].dtype != GMM_NONE && !call->fused.sums.wanted) gmm__reserve(plan, region, (size_t)size);
    return 1;
}

/* Enqueues the kernels of the bias gradient of a matrix `dy` with n columns. The rest of `args` is set. */
static gmm_status gmm__mma_enqueue_bgrad(const gmm__plan *plan, const gmm__cuda_split *split, int dy, int64_t n,
                                         int table_region, gmm_bgrad_args *args, gmm_stream stream) {
    const gmm__call *call = plan->call;
    cudaError_t e = gmm__cuda_operand(plan, dy, 0, 0, &args->dy, stream);
    int32_t grid;
    if (e == cudaSuccess) e = gmm__cuda_operand(plan, GMM__DB, 1, table_region, &args->db, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    args->offsets = split->offsets;
    args->tiles = split->tiles[GMM__TILES_128];
    args->groups = call->groups.count;
    args->n = (int32_t)n;
    args->capacity = call->rows;
    args->beta = call->grad[GMM__DB].beta;
    args->frozen = call->grad[GMM__DB].frozen;
    args->beta_all = gmm__cuda_beta(&call->grad[GMM__DB]);
    grid = gmm__grid(call->ctx->device.processors, call->options.sm_limit, GMM_BGRAD_PER_SM, INT32_MAX);
    return gmm__cuda_status(call, gmm_launch_bgrad(args->dy.dtype, grid, gmm__cuda_pdl(call), args, stream));
}

static int gmm__mma_plan_linear_bgrad(const gmm__call *call, gmm__plan *plan) {
    gmm__cuda_reserve_split(plan, call->groups.count);
    gmm__cuda_reserve_table(call, plan, GMM__DB, GMM__MATRIX_TABLE);
    gmm__cuda_reserve_table(call, plan, GMM__BIAS, GMM__BIAS_TABLE);
    if (call->fused.sums.wanted) (void)snprintf(plan->note, sizeof plan->note, "adds the column sums of the cast");
    return gmm__mma_reserve_partials(call, plan, call->out, GMM__BGRAD_PARTIALS);
}

static gmm_status gmm__mma_launch_linear_bgrad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    const gmm__column_sums *sums = &call->fused.sums;
    gmm__cuda_split split;
    gmm_bgrad_args args;
    const gmm_status s = gmm__cuda_split_of(plan, GMM__TILES_128, NULL, &split, stream);
    cudaError_t e;

    memset(&args, 0, sizeof args);
    if (s != GMM_OK) return s;
    e = gmm__cuda_operand(plan, GMM__BIAS, 1, GMM__BIAS_TABLE, &args.bias, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    if (call->mat[GMM__DB].dtype != GMM_NONE)
        args.partials = sums->wanted ? sums->partials : (float *)gmm__region(plan, GMM__BGRAD_PARTIALS);
    args.has_partials = sums->wanted;
    args.bias_scale = d->bias_scale;
    args.dy_index = gmm__cuda_linear_index(call, GMM__DY);
    args.d_bias_scale = d->d_bias_scale;
    args.d_bias_scale_add = d->d_bias_scale_add;
    args.zero_tail = call->groups.tail == GMM_TAIL_ZERO;
    return gmm__mma_enqueue_bgrad(plan, &split, GMM__DY, call->out, GMM__MATRIX_TABLE, &args, stream);
}

#endif /* __CUDACC__ */

