/* ........................................................................... 14.13 WGMMA engine: grouped linear ... */

/* The WGMMA engine's grouped linear layers: availability, alignment rules, choice of the kernel, plans, launches. */

/* Reason why the engine is unavailable; NULL: it is available. */
static const char *gmm__wgmma_unavailable(const gmm_build *build) {
    if (build->capability != 90) return "needs compute capability 9.0";
    if (!build->sm90a) return "is not in this build: compile for sm_90a (-gencode arch=compute_90a,code=sm_90a)";
    return build->tensor_maps ? NULL : "needs a driver with cuTensorMapEncodeTiled";
}

/* Whether the rows of an operand begin at multiples of 16 bytes, as TMA requires; declines the call if not. A query
   assumes aligned addresses where it has none. Addresses in device tables are checked by the kernel, which sets a fault
   bit. */
static GMM__UNUSED int gmm__wgmma_check_alignment(const gmm__call *call, int role, const char *name, gmm__plan *plan) {
    const gmm_mat *m = &call->mat[role];
    const int64_t alignment = 128 / gmm_dtype_bits(m->dtype);
    const int host_table = (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST) != 0;
    int64_t g;
    if (m->ld % alignment)
        return gmm__decline(plan, "needs rows of %s at multiples of 16 bytes, not ld %lld", name, (long long)m->ld);
    if (call->groups.count > 1 && m->group_stride % alignment)
        return gmm__decline(plan, "needs matrices of %s at multiples of 16 bytes, not group_stride %lld", name,
                            (long long)m->group_stride);
    if ((uintptr_t)m->data % 16) return gmm__decline(plan, "needs %s at a multiple of 16 bytes, not %p", name, m->data);
    if (call->query && !m->data && (!m->table || host_table)) plan->assumes_aligned = 1;
    for (g = 0; m->table && host_table && !call->query && g < call->groups.count; g++)
        if ((uintptr_t)m->table[g] % 16)
            return gmm__decline(plan, "needs %s at multiples of 16 bytes, not table[%lld] %p", name, (long long)g,
                                m->table[g]);
    return 1;
}

#ifdef __CUDACC__

/* The engine multiplies 16-bit operands and FP8 by TMA and wgmma. MX32 and NV16 are dequantized to 16 bits, by the GEMM
   kernel in registers or by a kernel before it in the workspace. The kernels read device splits without offsets in the
   workspace; host splits and host tables are copied to the regions of the MMA engine, which serves unaligned calls. A
   query without addresses reports the larger workspace of the two engines. "Packed" weights are quantized weights that
   the GEMM kernel itself dequantizes. */

/* Looks for the sm_90a code and the driver's tensor map encoder once per context, and records both in `build`. */
static void gmm__wgmma_open(gmm_context *ctx, gmm_build *build) {
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    void *encode = NULL;
    int current, built = 0;
    cudaError_t e = gmm__cuda_enter(ctx, &current);
    if (e == cudaSuccess) {
        built = gmm_sm90_present();
        e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result);
    }
    gmm__cuda_restore(ctx, current);
    (void)cudaGetLastError();
    ctx->wgmma_encode = (PFN_cuTensorMapEncodeTiled_v12000)encode;
    build->sm90a = (int32_t)(built != 0);
    build->tensor_maps = (int32_t)(e == cudaSuccess && result == cudaDriverEntryPointSuccess && encode != NULL);
    ctx->wgmma_unavailable = gmm__wgmma_unavailable(build);
}

/* Declines products whose rows or features the kernels do not index. */
static int gmm__wgmma_check_extents(const gmm__call *call, gmm__plan *plan) {
    const int64_t max_extent = GMM__MAX_EXTENT;
    if (call->rows <= GMM_SM90_RAGGED_ROWS && call->in <= max_extent && call->out <= max_extent) return 1;
    return gmm__decline(plan, "takes at most %d rows and %lld features", (int)GMM_SM90_RAGGED_ROWS,
                        (long long)max_extent);
}

/* Plans the grid of a product, and reserves its regions. tile_rows: the least that the device may choose; ctas_per_sm:
   CTAs that a multiprocessor holds; table_bytes: group tables of a CTA that shared memory does not hold. */
static int gmm__wgmma_plan_grid(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op, int64_t tile_rows,
                                int32_t tile_n, int32_t ctas_per_sm, size_t table_bytes) {
    const int64_t G = call->groups.count, n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t tiles_n = gmm__ceil_div(n, tile_n), max_tiles = GMM__MAX_EXTENT;
    const int64_t tiles_m = op == gmm_gemm_wgrad ? G * gmm__ceil_div(call->out, tile_rows) : call->rows / tile_rows + G;
    if (tiles_m > max_tiles / tiles_n)
        return gmm__decline(plan, "takes at most %lld tiles, not %lld rows of tiles with %lld each",
                            (long long)max_tiles, (long long)tiles_m, (long long)tiles_n);
    plan->grid[0] = gmm__grid(call->ctx->device.processors, call->options.sm_limit, ctas_per_sm, INT32_MAX);
    if (plan->grid[0] > 1) plan->grid[0] -= plan->grid[0] % 2; /* clusters of two CTAs */
    if (table_bytes) gmm__reserve(plan, GMM__WGMMA_GROUP_TABLES, (size_t)plan->grid[0] * table_bytes);
    gmm__cuda_reserve_product(call, plan, op);
    return 1;
}

#ifndef GMM_NO_QUANT
/* Plans an FP8 product. Partial sums are promoted to fp32 every 128 elements of the contraction. They are not promoted
   where no scale varies along the contraction and options.fp8_fast_accum is set; wgrad promotes always, which is no
   slower there. */
static int gmm__wgmma_plan_fp8(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int role_a = gmm__cuda_role_a(op), role_b = gmm__cuda_role_b(op), wgrad = op == gmm_gemm_wgrad;
    const gmm_mat *a = &call->mat[role_a], *b = &call->mat[role_b];
    const int64_t G = call->groups.count;
    const int32_t processors = call->ctx->device.processors;
    const int block_scaled = gmm_block_along(b->scaling) == 128;
    const int32_t scaling = block_scaled ? (b->scaling == GMM_SCALING_1X128 ? GMM_FP8_1D1D : GMM_FP8_1D2D)
                            : call->options.fp8_fast_accum && !wgrad ? GMM_FP8_FAST : GMM_FP8_1D2D;
    const gmm_fp8_kernel *k;
    char text[64];
    double price = 0.0;
    if (call->fused.product_act && !gmm__wgmma_serves_fp8_glu(call, plan)) return 0;
    plan->kernel = gmm__wgmma_choose_fp8(call, op, a->dtype, scaling, call->fused.product_act != NULL, processors,
                                         &price);
    if (plan->kernel < 0 || b->dtype != GMM_E4M3 || a->scaling == GMM_SCALING_128X128 ||
        (gmm_block_along(b->scaling) != 128 && gmm_block_along(b->scaling) != 0))
        return gmm__decline(plan, "has no kernel for %s %s times %s %s", gmm_dtype_name(a->dtype),
                            gmm_scaling_name(a->scaling), gmm_dtype_name(b->dtype), gmm_scaling_name(b->scaling));
    k = &gmm_fp8_kernels[plan->kernel];
    plan->kernel_name = k->name;
    if (!gmm__wgmma_check_extents(call, plan) ||
        !gmm__wgmma_plan_grid(call, plan, op, GMM_FP8_BLOCK_ROWS, k->tile_n, 1,
                              G > GMM_SM90_SMEM_GROUPS ? gmm_fp8_table_bytes(G) : 0) ||
        !gmm__wgmma_check_alignment(call, role_a, op == gmm_gemm_fwd ? "x" : "dy", plan) ||
        !gmm__wgmma_check_alignment(call, role_b, wgrad ? "x" : "w", plan))
        return 0;
    (void)snprintf(plan->note, sizeof plan->note, "%s by %s, %s, %s, %d blocks%s", gmm_dtype_name(a->dtype),
                   gmm_dtype_name(b->dtype), scaling == GMM_FP8_FAST ? "fast accumulation" : "promoted every 128",
                   gmm__wgmma_fp8_tile_note(plan->kernel, text), plan->grid[0],
                   call->fused.product_act ? ", with the activation and its cast" : "");
    return 1;
}
#endif /* GMM_NO_QUANT */

/* Plans a product of 16-bit operands: kernel, grid, workspace. `kernel_op` is the operation of the kernel, which
   differs from `op` in dgrad with transposed weights: that runs as fwd. `b_format` is the format of packed weights that
   kernels may read, or 0. copies: gathered rows may be copied to the workspace. */
static int gmm__wgmma_plan_tiles(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op, gmm_gemm_op kernel_op,
                                 gmm_dtype dtype, int32_t b_format, int copies) {
    const int a = gmm__cuda_role_a(op), b = gmm__cuda_role_b(op), d = gmm__cuda_role_d(op);
    const int64_t G = call->groups.count, max_extent = GMM__MAX_EXTENT;
    const gmm_sm90_kernel *k;
    double cost = 0.0;
    if (call->mat[d].dtype != GMM_F32 && call->mat[d].dtype != dtype)
        return gmm__decline(plan, "makes no %s from %s", gmm_dtype_name(call->mat[d].dtype), gmm_dtype_name(dtype));
    if (!gmm__wgmma_check_extents(call, plan)) return 0;
    if (call->mat[a].ld > max_extent || call->mat[b].ld > max_extent || call->mat[d].ld > max_extent)
        return gmm__decline(plan, "takes ld up to %lld", (long long)max_extent);
    plan->kernel = gmm__wgmma_choose(call, op, kernel_op, dtype, b_format, call->ctx->device.processors, copies, &cost);
    if (plan->kernel < 0)
        return copies ? gmm__decline(plan, "has no kernel for %s operands", gmm_dtype_name(dtype))
                      : gmm__decline(plan, "has no kernel that gathers rows itself, as options.workspace_limit asks");
    k = &gmm_sm90_kernels[plan->kernel];
    plan->kernel_name = k->name;
    /* but in wgrad, the device may choose tiles of little more than half the height */
    return gmm__wgmma_plan_grid(call, plan, op, (op == gmm_gemm_wgrad ? 16 : 8) * k->m16, k->tile_n, k->ctas_per_sm,
                                G > GMM_SM90_SMEM_GROUPS ? gmm_sm90_table_bytes(G) : 0);
}

/* Whether operands are MX32 or NV16, which are dequantized to 16 bits before they are multiplied. */
static int gmm__wgmma_dequantizes(const gmm__call *call, gmm_gemm_op op) {
    const gmm_scaling scaling = call->mat[gmm__cuda_role_b(op)].scaling;
    return scaling == GMM_SCALING_MX32 || scaling == GMM_SCALING_NV16;
}
/* Whether tokens are transposed while they are dequantized. That is wgrad of NV16, whose columnwise copies are stored
   as lines along the tokens, the contraction of wgrad. Each group is then padded to a multiple of 16 rows. */
static int gmm__wgmma_transposes(const gmm__call *call, gmm_gemm_op op) {
    return op == gmm_gemm_wgrad && call->mat[GMM__X_].scaling == GMM_SCALING_NV16;
}

#ifndef GMM_NO_QUANT
/* Format (b_format) of packed weights that kernels can read: the lines run along the contraction, and pitch and stride
   suit TMA; 0 = none. Addresses are checked by the plan, so that a query without addresses reports the same
   workspace. */
static int32_t gmm__wgmma_packed_format(const gmm__call *call, gmm_gemm_op op) {
    const gmm_mat *b = &call->mat[gmm__cuda_role_b(op)];
    const int64_t alignment = 128 / gmm_dtype_bits(b->dtype);
    const int mx = b->scaling == GMM_SCALING_MX32;
    if (op == gmm_gemm_wgrad || (op == gmm_gemm_dgrad && mx) || b->dtype == GMM_E5M2 || b->ld % alignment ||
        (call->groups.count > 1 && b->group_stride % alignment))
        return 0;
    return !mx ? gmm_sm90_b_format_nv4 : b->dtype == GMM_E2M1 ? gmm_sm90_b_format_mx4 : gmm_sm90_b_format_mx8;
}
/* Rows and columns of operand 0 (A) or 1 (B) after dequantization into the workspace; 0 rows if it is not quantized. */
static int64_t gmm__wgmma_dequantized_rows(const gmm__call *call, gmm_gemm_op op, int operand, int64_t *cols) {
    const int64_t G = call->groups.count;
    const int role = operand ? gmm__cuda_role_b(op) : gmm__cuda_role_a(op);
    const int weight = role == GMM__W;
    const int transposed = call->mat[role].scaling == GMM_SCALING_NV16 && call->direction[role] == GMM_COLUMNWISE;
    *cols = weight ? (transposed ? call->out : call->in) : role == GMM__X_ ? call->in : call->out;
    if (call->mat[role].scaling == GMM_SCALING_NONE) return 0;
    return weight ? G * (transposed ? call->in : call->out)
                  : call->rows + (gmm__wgmma_transposes(call, op) ? 15 * G : 0);
}

/* CTAs of the dequantizing kernel for each multiprocessor, at most: more than it holds at a time. */
enum { GMM__EXPAND_PER_SM = 64 };

/* Plans a product of MX32 or NV16 operands: the product of 16-bit operands, and the regions for its dequantized
   operands. */
static int gmm__wgmma_plan_dequantized(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const gmm_mat *a = &call->mat[gmm__cuda_role_a(op)], *b = &call->mat[gmm__cuda_role_b(op)];
    const int64_t G = call->groups.count;
    const int nv = b->scaling == GMM_SCALING_NV16;
    const gmm_dtype out = call->mat[gmm__cuda_role_d(op)].dtype;
    const gmm_dtype dtype = a->scaling == GMM_SCALING_NONE ? a->dtype : nv && out == GMM_F16 ? GMM_F16 : GMM_BF16;
    int64_t blocks = 0, elements = 0; /* CTAs of the dequantizing kernel; 16-bit elements that it writes */
    char tile[64];
    int operand;
    if (gmm__cuda_index_of(call, gmm__cuda_role_a(op)))
        return gmm__decline(plan, "gathers no rows beside quantized weights");
    if (a->dtype == GMM_F32 || (a->dtype == GMM_F16 && !nv))
        return gmm__decline(plan, "multiplies no %s by %s weights", gmm_dtype_name(a->dtype),
                            gmm_scaling_name(b->scaling));
    if (!gmm__wgmma_plan_tiles(call, plan, op, op == gmm_gemm_dgrad && nv ? gmm_gemm_fwd : op, dtype,
                               gmm__wgmma_packed_format(call, op), 1))
        return 0;
    if (a->scaling == GMM_SCALING_NONE &&
        !gmm__wgmma_check_alignment(call, gmm__cuda_role_a(op), op == gmm_gemm_fwd ? "x" : "dy", plan))
        return 0;
    if (gmm_sm90_kernels[plan->kernel].b_format && !gmm__wgmma_check_alignment(call, gmm__cuda_role_b(op), "w", plan))
        return 0;
    for (operand = 0; operand < 2; operand++) {
        int64_t cols;
        const int64_t rows = operand && gmm_sm90_kernels[plan->kernel].b_format
                                 ? 0 : gmm__wgmma_dequantized_rows(call, op, operand, &cols);
        if (!rows) continue;
        if (rows + G * GMM_GROUP_ROWS > INT32_MAX / gmm__ceil_div(cols, 64))
            return gmm__decline(plan, "converts at most %d blocks of 64 columns, not %lld rows of %lld columns",
                                INT32_MAX, (long long)rows, (long long)cols);
        blocks += gmm__ceil_div(rows + G * GMM_GROUP_ROWS, 32) * gmm__ceil_div(cols, GMM_EXPAND_SPAN);
        elements += rows * cols;
        gmm__reserve(plan, operand ? GMM__COPY_B : GMM__COPY_A, (size_t)(rows * cols) * 2);
    }
    if (nv) gmm__reserve(plan, GMM__WGMMA_ALPHA, 2 * (size_t)G * sizeof(float));
    if (gmm__wgmma_transposes(call, op)) {
        gmm__reserve(plan, GMM__WGMMA_TILES16, (size_t)(G + 1) * sizeof(int32_t));
        gmm__reserve(plan, GMM__WGMMA_OFFSETS16, (size_t)(G + 1) * sizeof(int64_t));
    }
    if (call->options.workspace_limit && plan->workspace_bytes > (uint64_t)call->options.workspace_limit)
        return gmm__decline(plan, "needs %lld bytes of workspace, not options.workspace_limit %lld",
                            (long long)plan->workspace_bytes, (long long)call->options.workspace_limit);
    plan->grid[1] = gmm__grid(call->ctx->device.processors, call->options.sm_limit, GMM__EXPAND_PER_SM, blocks);
    (void)snprintf(plan->note, sizeof plan->note, "%s by %s as %s in %lld MiB of workspace, %s, %d blocks",
                   gmm_dtype_name(a->dtype), gmm_dtype_name(b->dtype), gmm_dtype_name(dtype),
                   (long long)(elements >> 19), gmm__wgmma_tile_note(plan->kernel, tile), plan->grid[0]);
    return 1;
}
#endif /* GMM_NO_QUANT */

static int gmm__wgmma_plan_product(const gmm__call *call, gmm__plan *plan) {
    const gmm_gemm_op op = gmm__wgmma_op(call->op);
    const gmm_gemm_op kernel_op = call->fused.product_act ? gmm__wgmma_fused_op(call) : op;
    const int role_a = gmm__cuda_role_a(op), role_b = gmm__cuda_role_b(op);
    const gmm_dtype dtype = call->mat[role_a].dtype;
    char tile[64];
    int copies, gathers;
    if (call->ctx->wgmma_unavailable) return gmm__decline(plan, "%s", call->ctx->wgmma_unavailable);
#ifndef GMM_NO_QUANT
    if (call->fused.product_act && gmm__wgmma_dequantizes(call, op))
        return gmm__decline(plan, "fuses no activation with mx32 and nv16");
    if (gmm__wgmma_dequantizes(call, op)) return gmm__wgmma_plan_dequantized(call, plan, op);
    if (gmm__quantized(call)) return gmm__wgmma_plan_fp8(call, plan, op);
#endif
    if (call->fused.product_cast) return gmm__decline(plan, "quantizes no activation of a product in 16 bits");
    if (dtype != GMM_BF16 && dtype != GMM_F16) return gmm__decline(plan, "multiplies no %s", gmm_dtype_name(dtype));
    for (copies = 1; copies >= 0; copies--) { /* without copies where options.workspace_limit forbids them */
        plan->workspace_bytes = 0;
        if ((kernel_op == gmm_gemm_glu && !gmm__wgmma_serves_glu(call, plan, copies)) ||
            (kernel_op == gmm_gemm_dglu && !gmm__wgmma_serves_dglu(call, plan, copies)) ||
            !gmm__wgmma_plan_tiles(call, plan, op, kernel_op, dtype, 0, copies) ||
            !gmm__wgmma_check_alignment(call, role_a, op == gmm_gemm_fwd ? "x" : "dy", plan) ||
            !gmm__wgmma_check_alignment(call, role_b, op == gmm_gemm_wgrad ? "x" : "w", plan))
            return 0;
        gathers = gmm_sm90_kernels[plan->kernel].gather;
        (void)snprintf(plan->note, sizeof plan->note, "%s, %d blocks%s%s", gmm__wgmma_tile_note(plan->kernel, tile),
                       plan->grid[0], gathers ? ", which gather rows" : "",
                       kernel_op == gmm_gemm_dglu ? ", with the activation's gradient"
                       : kernel_op == gmm_gemm_glu ? ", with the activation" : "");
        if (kernel_op == gmm_gemm_dglu) gmm__wgmma_reserve_dots(call, plan);
        if (gathers || gmm__cuda_plan_gather(call, plan, op)) return 1;
    }
    return 0;
}

#ifndef GMM_NO_QUANT
/* Launches an FP8 product; `product` holds the split and every argument except the scales. */
static gmm_status gmm__wgmma_launch_fp8(const gmm__plan *plan, const gmm_sm90_args *product, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_gemm_op op = gmm__wgmma_op(call->op);
    const int role_b = gmm__cuda_role_b(op);
    gmm_fp8_args args;
    cudaError_t e = cudaSuccess;
    memset(&args, 0, sizeof args);
    args.p = product->p;
    args.groups = product->groups;
    args.a_scale = call->mat[gmm__cuda_role_a(op)];
    args.b_scale = call->mat[role_b];
    args.b_scale.table = product->p.b.table;
    args.wgrad = op == gmm_gemm_wgrad;
    args.b_columnwise = op == gmm_gemm_dgrad;
    if (call->fused.product_act) gmm__wgmma_fp8_glu_args(call, &args);
    if (call->groups.count > GMM_SM90_SMEM_GROUPS) args.tables = (int32_t *)gmm__region(plan, GMM__WGMMA_GROUP_TABLES);
    e = gmm__cuda_device_table(plan, &call->mat[role_b], call->mat[role_b].scale_table, call->groups.count,
                               GMM__SCALE_TABLE, &args.b_scale.scale_table, stream);
    if (e == cudaSuccess) e = gmm_launch_fp8(call->ctx->wgmma_encode, plan->kernel, plan->grid[0], &args, stream);
    return gmm__cuda_status(call, e);
}

/* Enqueues the dequantization of a product's operands to the workspace, and makes `product` address the results. Packed
   weights are described to the GEMM kernel instead. Where tokens are dequantized, the split of `product` consists of
   row offsets, those of `split`. NV16 has a scale for the whole tensor besides those of its blocks: it becomes part of
   alpha. */
static gmm_status gmm__wgmma_dequantize(const gmm__plan *plan, const gmm__cuda_split *split, gmm_sm90_args *product,
                                        gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_gemm_op op = gmm__wgmma_op(call->op);
    const int transposes = gmm__wgmma_transposes(call, op);
    const int64_t G = call->groups.count;
    gmm_expand_args args;
    cudaError_t e = cudaSuccess;
    int operand;
    memset(&args, 0, sizeof args);
    args.dtype = gmm_sm90_kernels[plan->kernel].dtype;
    args.groups = call->groups.count;
    args.offsets = (const int64_t *)product->groups.splits;
    args.tiles = split->tiles[GMM__TILES_128];
    for (operand = 0; operand < 2; operand++) {
        const int role = operand ? gmm__cuda_role_b(op) : gmm__cuda_role_a(op);
        gmm_expand_operand *s = &args.operand[operand];
        gmm_kmat *m = operand ? &product->p.b : &product->p.a;
        int64_t cols;
        if (call->mat[role].scaling == GMM_SCALING_NONE) continue;
        (void)gmm__wgmma_dequantized_rows(call, op, operand, &cols);
        s->src = call->mat[role];
        s->src.table = m->table;
        e = gmm__cuda_device_table(plan, &call->mat[role], call->mat[role].scale_table, G, GMM__SCALE_TABLE,
                                   &s->src.scale_table, stream); /* only weights have tables of scales */
        if (e != cudaSuccess) return gmm__cuda_status(call, e);
        if (operand && gmm_sm90_kernels[plan->kernel].b_format) { /* packed weights */
            product->codes = s->src;
            product->along = call->direction[role];
            product->rows = (int32_t)call->out;
            product->cols = (int32_t)call->in;
            m->stride = s->src.group_stride * gmm_dtype_bits(s->src.dtype) / 8;
            s->src.dtype = GMM_NONE;
            continue;
        }
        s->dst = (uint16_t *)gmm__region(plan, operand ? GMM__COPY_B : GMM__COPY_A);
        s->direction = call->direction[role];
        s->grouped = role != GMM__W;
        s->rows = (int32_t)(role == GMM__W ? call->out : call->rows);
        s->cols = (int32_t)(role == GMM__DY ? call->out : call->in);
        m->dtype = args.dtype;
        m->data = s->dst;
        m->table = NULL;
        m->ld = cols;
        m->stride = role == GMM__W ? call->in * call->out * 2 : 0;
    }
    if (call->mat[gmm__cuda_role_b(op)].scaling == GMM_SCALING_NV16) {
        args.alpha = product->p.alpha;
        args.alpha_per_group = product->p.alpha_per_group;
        args.factor = (float *)gmm__region(plan, GMM__WGMMA_ALPHA);
        product->p.alpha = args.factor;
        product->alpha2 = args.factor + G;
        product->p.alpha_per_group = 1;
    }
    if (transposes) {
        args.blocks16 = split->tiles[GMM__TILES_16];
        args.ends = (int64_t *)gmm__region(plan, GMM__WGMMA_OFFSETS16);
        product->groups.splits = args.ends;
        product->groups.capacity = product->p.capacity = call->rows + 15 * G;
    }
    if (args.operand[0].src.dtype == GMM_NONE && args.operand[1].src.dtype == GMM_NONE && !args.factor) return GMM_OK;
    return gmm__cuda_status(call, gmm_launch_expand(transposes, plan->grid[1], call->options.sm_limit > 0,
                                                    gmm__cuda_pdl(call), &args, stream));
}
#endif /* GMM_NO_QUANT */

/* Enqueues the offsets of a host split, zeros behind the last group of all results, the dequantization, and the
   product. */
static gmm_status gmm__wgmma_launch_product(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_gemm_op op = gmm__wgmma_op(call->op);
    const int wgrad = op == gmm_gemm_wgrad;
    const int dequantizes = gmm__wgmma_dequantizes(call, op), fp8 = gmm__quantized(call) && !dequantizes;
    const int quantized_tokens = dequantizes && call->mat[gmm__cuda_role_a(op)].scaling != GMM_SCALING_NONE;
    int32_t *tiles16 = gmm__wgmma_transposes(call, op) ? (int32_t *)gmm__region(plan, GMM__WGMMA_TILES16) : NULL;
    int64_t *offsets = (int64_t *)gmm__region(plan, GMM__ROW_OFFSETS);
    gmm__cuda_split split;
    gmm_sm90_args args;
    gmm_status s = GMM_OK;
    cudaError_t e = cudaSuccess;

    memset(&args, 0, sizeof args);
    memset(&split, 0, sizeof split);
    args.groups = call->groups;
    if (quantized_tokens) s = gmm__cuda_split_of(plan, GMM__TILES_128, tiles16, &split, stream);
    else if (call->groups.on_host) {
        s = gmm__cuda_enqueue_offsets(call, offsets, NULL, 1, stream);
        split.offsets = offsets;
    }
    if (s != GMM_OK) return s;
    if (split.offsets) args.groups = gmm__cuda_groups_at(&args.groups, split.offsets);
    if ((s = gmm__cuda_product_args(plan, op, &args.p, stream)) != GMM_OK) return s;
    if (args.p.zero_tail && !wgrad && !call->fused.drops_d) {
        gmm_tail_args tail;
        tail.d = args.p.d;
        tail.groups = args.groups;
        tail.n = args.p.n;
        e = gmm_launch_tail(plan->grid[0], gmm__cuda_pdl(call), &tail, stream);
        if (e != cudaSuccess) return gmm__cuda_status(call, e);
    }
#ifndef GMM_NO_QUANT
    if (dequantizes && (s = gmm__wgmma_dequantize(plan, &split, &args, stream)) != GMM_OK) return s;
#endif
    if (call->fused.product_act && !fp8)
        e = gmm__wgmma_is_dgrad(call) ? gmm__wgmma_dglu_args(plan, &args, stream)
                                      : gmm__wgmma_glu_args(plan, &args, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    args.index = gmm__cuda_linear_index(call, gmm__cuda_role_a(op));
    if (!fp8 && !gmm_sm90_kernels[plan->kernel].gather)
        e = gmm__cuda_gather(plan, op, &args.p, &args.groups, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    if (!args.p.a.data) args.p.a.data = plan->workspace; /* gathered from no rows; a tensor map needs an address */
    if (call->rows == 0) { /* token matrices without rows may have no address, but a tensor map needs one */
        args.p.a.data = plan->workspace;
        if (wgrad) args.p.b.data = plan->workspace;
        else args.p.d.data = plan->workspace;
    }
#ifndef GMM_NO_QUANT
    if (fp8) return gmm__wgmma_launch_fp8(plan, &args, stream);
#endif
    if (call->groups.count > GMM_SM90_SMEM_GROUPS)
        args.tables = (int32_t *)gmm__region(plan, GMM__WGMMA_GROUP_TABLES);
    e = gmm_launch_sm90(call->ctx->wgmma_encode, plan->kernel, plan->grid[0], &args, stream);
    if (e == cudaSuccess) e = gmm__wgmma_dglu_dprob(plan, &args, stream);
    return gmm__cuda_status(call, e);
}

#endif /* __CUDACC__ */

