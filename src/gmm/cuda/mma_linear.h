/* ............................................................................. 14.11 MMA engine: grouped linear ... */

#ifdef __CUDACC__

/* Plans and launches of the MMA engine's linear layers. The WGMMA engine uses the same workspace regions, offsets and
   arguments; the other CUDA parts use gmm__cuda_status and gmm__mma_enqueue_offsets. */

/* Regions of the workspace. */
enum {
    GMM__MMA_OFFSETS,         /* [G + 1] int64: row offsets of the groups */
    GMM__MMA_TILES,           /* [G + 1] int32: prefix sums of the groups' tiles */
    GMM__MMA_MATRIX_TABLE,    /* [G] device copies of host tables: addresses of w, dw or db */
    GMM__MMA_BIAS_TABLE,      /* [G] addresses of biases */
    GMM__MMA_SCALE_TABLE,     /* [G] addresses of the weights' scales */
    GMM__MMA_BGRAD_PARTIALS,  /* [strips, out] float: partial sums of the bias gradient */
    GMM__COPY_A,              /* copies of operands: gathered rows; WGMMA: quantized ones as 16-bit elements */
    GMM__COPY_B,
    GMM__WGMMA_ALPHA,         /* [2][G] float: two scales of each group's accumulators, applied in this order */
    GMM__WGMMA_TILES16,       /* [G + 1] int32: prefix sums of the groups' blocks of 16 rows, for transposed tokens */
    GMM__WGMMA_OFFSETS16,     /* [G + 1] int64: row offsets of groups padded to multiples of 16 rows */
    GMM__WGMMA_GROUP_TABLES = GMM__MMA_BGRAD_PARTIALS /* group tables of each CTA; no operation needs both regions */
};

/* The status of a call whose last CUDA function returned e. */
static gmm_status gmm__cuda_status(const gmm__call *call, cudaError_t e) {
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError(); /* clears the error, so that the next call does not report it */
    return gmm__fail(&call->ctx->error, GMM_E_CUDA, "%s: CUDA: %s%s%s%s", call->function, cudaGetErrorString(e),
                     call->shapes[0] ? " (" : "", call->shapes, call->shapes[0] ? ")" : "");
}

/* The largest extent of kernels that index by int32, so that it still fits rounded up to whole tiles. */
enum { GMM__MAX_EXTENT = INT32_MAX - 1024 };

/* The groups of a call with their splits as row offsets in device memory. */
static gmm_groups gmm__groups_at(const gmm_groups *groups, const int64_t *offsets) {
    gmm_groups g = *groups;
    g.splits = offsets;
    g.form = GMM_SPLIT_OFFSETS;
    g.dtype = GMM_I64;
    g.on_host = g.row_align = 0;
    return g;
}

/* Sets *table to `source`, or to its copy in `region` of the workspace if the tables of `m` are in host memory. */
static cudaError_t gmm__mma_device_table(const gmm__plan *plan, const gmm_mat *m, void *const *source, int64_t count,
                                         int region, void *const **table, gmm_stream stream) {
    *table = source;
    if (!source || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return cudaSuccess;
    *table = (void *const *)gmm__part(plan, region);
    return gmm_launch_copy(gmm__part(plan, region), source, count, stream);
}

/* Reserves the regions of offsets and tiles, and the region for the device copy of a table in host memory. */
static void gmm__mma_reserve_groups(const gmm__call *call, gmm__plan *plan) {
    const size_t groups = (size_t)call->groups.count;
    gmm__reserve(plan, GMM__MMA_OFFSETS, (groups + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__MMA_TILES, (groups + 1) * sizeof(int32_t));
}
static void gmm__mma_reserve_table(const gmm__call *call, gmm__plan *plan, int role, int region) {
    if (call->mat[role].dtype != GMM_NONE && (call->mat[role].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
        gmm__reserve(plan, region, (size_t)call->groups.count * sizeof(void *));
}

/* Whether a call's kernels use programmatic dependent launch. With options.sm_limit they do not: CTAs of the dependent
   kernel would wait on the multiprocessors that the caller keeps free for other kernels. */
static int gmm__mma_pdl(const gmm__call *call) { return call->ctx->device.pdl && call->options.sm_limit == 0; }

/* Enqueues the computation of a call's row offsets, and of the prefix sums of its tiles, to the addresses in `args`.
   Offsets of a split on the host are computed here and copied to the device; a kernel computes all others. */
static gmm_status gmm__mma_enqueue_split(const gmm__call *call, gmm_offsets_args *args, gmm_stream stream) {
    args->groups = call->groups;
    if (call->groups.on_host) { /* gmm__check_split has refused faulty sizes, so that `fault` stays 0 */
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
            e = gmm_launch_copy(args->offsets + first, values, count, stream);
        }
        if (e != cudaSuccess || (!args->tiles[0] && !args->tiles[1]))
            return gmm__cuda_status(call, e);
        args->groups.splits = args->offsets; /* the kernel reads these offsets, and writes them back unchanged */
        args->groups.form = GMM_SPLIT_OFFSETS;
        args->groups.dtype = GMM_I64;
        args->groups.row_align = 0;
    }
    return gmm__cuda_status(call, gmm_launch_offsets(args, gmm__mma_pdl(call), stream));
}

/* The same with the prefix sums of tiles of `tile_rows` rows alone, unless `tiles` is NULL. */
static gmm_status gmm__mma_enqueue_offsets(const gmm__call *call, int64_t *offsets, int32_t *tiles, int32_t tile_rows,
                                           gmm_stream stream) {
    gmm_offsets_args args;
    memset(&args, 0, sizeof args);
    args.offsets = offsets;
    args.tiles[0] = tiles;
    args.tile_rows[0] = tile_rows;
    return gmm__mma_enqueue_split(call, &args, stream);
}

/* Rows of a tile by gmm__tile_kind. */
static const int32_t gmm__tile_rows[GMM__TILE_KINDS] = { GMM_TILE, 16 };
typedef char gmm__tile_kinds_fit[(int)GMM__TILE_KINDS == (int)GMM_OFFSETS_TILES ? 1 : -1];

/* The offsets of a call's groups and the prefix sums of their tiles. */
typedef struct gmm__mma_split {
    const int64_t *offsets;
    const int32_t *tiles[GMM__TILE_KINDS];
} gmm__mma_split;

/* An MLP computes the split once for its casts, dequantizations, activations and bias gradients; the products of MMA
   compute it again, with the prefix sums of their kernel's tiles. For calls outside of an MLP this enqueues the
   computation into the workspace, with the prefix sums of one kind of tile, and for transposed dequantizations with
   those of 16 rows, to `tiles16`. */
static gmm_status gmm__mma_split_of(const gmm__plan *plan, enum gmm__tile_kind kind, int32_t *tiles16,
                                    gmm__mma_split *split, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm_offsets_args args;
    int k;
    memset(split, 0, sizeof *split);
    if (call->split_tiles) {
        split->offsets = (const int64_t *)call->groups.splits;
        for (k = 0; k < GMM__TILE_KINDS; k++)
            split->tiles[k] = call->split_tiles + k * (call->groups.count + (int64_t)1);
        return GMM_OK;
    }
    memset(&args, 0, sizeof args);
    args.offsets = (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
    args.tiles[kind] = (int32_t *)gmm__part(plan, GMM__MMA_TILES);
    if (tiles16) args.tiles[GMM__TILES_16] = tiles16;
    memcpy(args.tile_rows, gmm__tile_rows, sizeof args.tile_rows);
    split->offsets = args.offsets;
    for (k = 0; k < GMM__TILE_KINDS; k++) split->tiles[k] = args.tiles[k];
    return gmm__mma_enqueue_split(call, &args, stream);
}

/* Describes an operand to kernels; `per_group`: it has one matrix per group. A host table is copied to `region` of the
   workspace. */
static cudaError_t gmm__mma_operand(const gmm__plan *plan, int role, int per_group, int region, gmm_kmat *out,
                                    gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    memset(out, 0, sizeof *out);
    out->dtype = m->dtype;
    out->data = m->data;
    out->table = m->table;
    out->ld = m->ld;
    out->stride = per_group ? m->group_stride * (gmm_dtype_bits(m->dtype) / 8) : 0;
    if (m->dtype == GMM_NONE) return cudaSuccess;
    return gmm__mma_device_table(plan, m, m->table, plan->call->groups.count, region, &out->table, stream);
}

/* The beta of a gradient's destination as far as the host knows it: 0 or 1, without the array of betas by group. */
static float gmm__mma_beta(const gmm_grad *grad) {
    gmm_grad g = *grad;
    g.beta = NULL; /* device memory: the kernels read it */
    return gmm__grad_beta(&g, 0);
}

static gmm_status gmm__mma_launch_offsets(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm_offsets_args args;
    int k;
    memset(&args, 0, sizeof args);
    args.offsets = (int64_t *)call->output;
    for (k = 0; k < GMM__TILE_KINDS; k++)
        if (call->tile_kinds >> k & 1) args.tiles[k] = call->split_tiles + k * (call->groups.count + (int64_t)1);
    memcpy(args.tile_rows, gmm__tile_rows, sizeof args.tile_rows);
    return gmm__mma_enqueue_split(call, &args, stream);
}

/* Roles of the operands of the product D = A B^T, which has M rows, N columns and the contraction K: fwd multiplies x
   by w, dgrad dy by w, wgrad dy by x. */
static int gmm__mma_role_a(gmm_gemm_op op) { return op == gmm_gemm_fwd ? GMM__X_ : GMM__DY; }
static int gmm__mma_role_b(gmm_gemm_op op) { return op == gmm_gemm_wgrad ? GMM__X_ : GMM__W; }
static int gmm__mma_role_d(gmm_gemm_op op) {
    return op == gmm_gemm_fwd ? GMM__Y : op == gmm_gemm_dgrad ? GMM__DX : GMM__DW;
}

/* The index of an operand whose rows are gathered, else NULL. */
static const int32_t *gmm__index_of(const gmm__call *call, int role) {
    return role == GMM__X_ ? call->d.linear.x_index : role == GMM__DY ? call->d.linear.dy_index : NULL;
}
static gmm_row_index gmm__row_index(const gmm__call *call, int role) {
    gmm_row_index index;
    index.at = gmm__index_of(call, role);
    index.fault = call->groups.fault;
    index.div = call->d.linear.index_div;
    index.rows = (int32_t)call->d.linear.index_rows;
    return index;
}
/* Bytes from row to row of an operand's gathered copy in the workspace; 0: the rows are not gathered. */
static int64_t gmm__copy_pitch(const gmm__call *call, int role) {
    const int64_t cols = role == GMM__X_ ? call->in : call->out, size = gmm_dtype_bits(call->mat[role].dtype) / 8;
    return gmm__index_of(call, role) ? (cols * size + 15) / 16 * 16 : 0;
}
/* Reserves the copies of gathered operands, the last regions of a plan, and says so in the note. Declines what
   options.workspace_limit forbids. */
static int gmm__mma_plan_gather(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int64_t pitch_a = gmm__copy_pitch(call, gmm__mma_role_a(op));
    const int64_t pitch_b = gmm__copy_pitch(call, gmm__mma_role_b(op));
    const size_t used = strlen(plan->note);
    int64_t bytes;
    if (pitch_a + pitch_b == 0) return 1;
    if (!gmm__mul(call->rows, pitch_a + pitch_b, &bytes))
        return gmm__decline(plan, "copies no %lld rows of %lld bytes", (long long)call->rows,
                            (long long)(pitch_a + pitch_b));
    plan->grid[1] = gmm__grid(call->ctx->device.processors, call->options.sm_limit, 8, INT32_MAX);
    gmm__reserve(plan, GMM__COPY_A, (size_t)(call->rows * pitch_a));
    gmm__reserve(plan, GMM__COPY_B, (size_t)(call->rows * pitch_b));
    if (call->options.workspace_limit && plan->workspace_bytes > (uint64_t)call->options.workspace_limit)
        return gmm__decline(plan, "needs %lld bytes of workspace to gather rows, not options.workspace_limit %lld",
                            (long long)plan->workspace_bytes, (long long)call->options.workspace_limit);
    plan->copies_rows = 1;
    (void)snprintf(plan->note + used, sizeof plan->note - used, ", rows gathered in %lld MiB of workspace",
                   (long long)(bytes >> 20));
    return 1;
}
/* Enqueues the copies of gathered operands, and makes `args` address them. `groups` has its splits on the device. */
static cudaError_t gmm__mma_gather(const gmm__plan *plan, gmm_gemm_op op, gmm_gemm_args *args, const gmm_groups *groups,
                                   gmm_stream stream) {
    const gmm__call *call = plan->call;
    cudaError_t e = cudaSuccess;
    int operand;
    for (operand = 0; operand < 2 && e == cudaSuccess; operand++) {
        const int role = operand ? gmm__mma_role_b(op) : gmm__mma_role_a(op);
        const int64_t pitch = gmm__copy_pitch(call, role), size = gmm_dtype_bits(call->mat[role].dtype) / 8;
        gmm_kmat *m = operand ? &args->b : &args->a;
        gmm_gather_args copy;
        if (!pitch) continue;
        memset(&copy, 0, sizeof copy);
        copy.src = (const char *)m->data;
        copy.dst = (char *)gmm__part(plan, operand ? GMM__COPY_B : GMM__COPY_A);
        copy.ld = m->ld * size;
        copy.pitch = pitch;
        copy.bytes = (role == GMM__X_ ? call->in : call->out) * size;
        copy.index = gmm__row_index(call, role);
        copy.groups = *groups;
        e = gmm_launch_gather(plan->grid[1], gmm__mma_pdl(plan->call), &copy, stream);
        m->data = copy.dst;
        m->ld = pitch / size;
    }
    return e;
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
    const int role_a = gmm__mma_role_a(op), role_b = gmm__mma_role_b(op);
    const gmm_mat *a = &call->mat[role_a], *b = &call->mat[role_b];
    const int64_t m = op == gmm_gemm_wgrad ? call->out : call->rows, n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t max_extent = INT32_MAX / 16 / 128 * 128; /* 16 bytes times a padded extent fit 32 bits */
    const int64_t max_tiles = op == gmm_gemm_wgrad ? call->groups.count * gmm__ceil_div(m, GMM_QGEMM_TILE_M)
                                                   : call->rows / GMM_QGEMM_TILE_M + call->groups.count;
    const int mx = b->scaling == GMM_SCALING_MX32, f16 = a->dtype == GMM_F16;
    /* columns of the kernel table: whether scales multiply the partial sums of blocks, and the dtype that mma reads */
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
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, op == gmm_gemm_wgrad ? GMM__DW : GMM__W, GMM__MMA_MATRIX_TABLE);
    if (op != gmm_gemm_wgrad) gmm__mma_reserve_table(call, plan, GMM__W, GMM__MMA_SCALE_TABLE);
    if (op == gmm_gemm_fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_BIAS_TABLE);
    (void)snprintf(plan->note, sizeof plan->note, "%s by %s as %s, tile %d x %d, %d blocks", gmm_dtype_name(a->dtype),
                   gmm_dtype_name(b->dtype), gmm_dtype_name(dtype), (int)GMM_QGEMM_TILE_M,
                   (int)gmm_qgemm_kernels[plan->kernel].tile_cols, plan->grid[0]);
    return gmm__mma_plan_gather(call, plan, op);
}
#endif /* GMM_NO_QUANT */

/* Rows of all groups together for which a plan is made: groups.rows_hint, or else the capacity. */
static int64_t gmm__mma_expected_rows(const gmm__call *call) {
    const int64_t hint = call->groups.rows_hint;
    return hint > 0 && hint < call->rows ? hint : call->rows;
}

/* Plans a product. Of the kernels, which all give the same bits, it chooses the one whose waves of tiles are estimated
   to cost least if all groups have the average size. */
static int gmm__mma_plan_product(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int64_t G = call->groups.count, max_extent = GMM__MAX_EXTENT;
    const int64_t m = op == gmm_gemm_wgrad ? call->out : call->rows;
    const int64_t n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t rows = gmm__mma_expected_rows(call);
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
        /* waves times the cost of a tile: its area for the products, 64 times its edges for loading the operands */
        cost = (double)gmm__ceil_div(tiles * tiles_n, (int64_t)processors * k->blocks) * k->blocks *
               ((double)k->tile_rows * k->tile_cols + 64.0 * (k->tile_rows + k->tile_cols));
        if (plan->kernel >= 0 && cost >= best) continue;
        best = cost;
        plan->kernel = i;
        plan->kernel_name = k->name;
        plan->grid[0] = gmm__grid(processors, call->options.sm_limit, k->blocks, max_tiles * tiles_n);
    }
    if (plan->kernel < 0) return gmm__decline(plan, "has no kernel for so many tiles of %s", gmm_dtype_name(dtype));
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, op == gmm_gemm_wgrad ? GMM__DW : GMM__W, GMM__MMA_MATRIX_TABLE);
    if (op == gmm_gemm_fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_BIAS_TABLE);
    (void)snprintf(plan->note, sizeof plan->note, "tile %d x %d, %d blocks",
                   (int)gmm_gemm_kernels[plan->kernel].tile_rows, (int)gmm_gemm_kernels[plan->kernel].tile_cols,
                   plan->grid[0]);
    return gmm__mma_plan_gather(call, plan, op);
}

/* Fills in the arguments of a product except offsets and tiles, and enqueues the copies of host tables. M, N and K of
   wgrad are out_features, in_features and the rows of a group, which the kernel reads from the offsets. */
static gmm_status gmm__mma_product_args(const gmm__plan *plan, gmm_gemm_op op, gmm_gemm_args *args, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    const int fwd = op == gmm_gemm_fwd, wgrad = op == gmm_gemm_wgrad;
    cudaError_t e = gmm__mma_operand(plan, gmm__mma_role_a(op), 0, 0, &args->a, stream);
    if (e == cudaSuccess)
        e = gmm__mma_operand(plan, gmm__mma_role_b(op), !wgrad, GMM__MMA_MATRIX_TABLE, &args->b, stream);
    if (e == cudaSuccess)
        e = gmm__mma_operand(plan, gmm__mma_role_d(op), wgrad, GMM__MMA_MATRIX_TABLE, &args->d, stream);
    if (e == cudaSuccess && fwd) e = gmm__mma_operand(plan, GMM__BIAS, 1, GMM__MMA_BIAS_TABLE, &args->bias, stream);
    args->groups = call->groups.count;
    args->capacity = call->rows;
    args->m = (int32_t)(wgrad ? call->out : call->rows);
    args->n = (int32_t)(fwd ? call->out : call->in);
    args->k = (int32_t)(fwd ? call->in : call->out);
    args->alpha = d->alpha;
    args->alpha_per_group = d->alpha_per_group;
    args->zero_tail = call->groups.tail == GMM_TAIL_ZERO;
    if (fwd) args->bias_scale = d->bias_scale;
    args->prob = d->prob;
    args->beta_all = d->y_add ? 1.0f : 0.0f;
    if (wgrad) {
        args->beta = call->grad[GMM__DW].beta;
        args->frozen = call->grad[GMM__DW].frozen;
        args->beta_all = gmm__mma_beta(&call->grad[GMM__DW]);
    }
    return gmm__cuda_status(call, e);
}

#ifndef GMM_NO_QUANT
/* Launches a product of quantized operands; `p` holds the arguments that products of floats have too, and the device
   table of the weights. */
static gmm_status gmm__mma_launch_quantized(const gmm__plan *plan, gmm_gemm_op op, const gmm_gemm_args *p,
                                            gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int role_a = gmm__mma_role_a(op), role_b = gmm__mma_role_b(op), fwd = op == gmm_gemm_fwd;
    gmm_qgemm_args args;
    cudaError_t e = cudaSuccess;
    memset(&args, 0, sizeof args);
    args.p = *p;
    args.a = call->mat[role_a];
    if (gmm__index_of(call, role_a)) { /* the copy of gathered floats */
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
    e = gmm__mma_device_table(plan, &call->mat[role_b], call->mat[role_b].scale_table, call->groups.count,
                              GMM__MMA_SCALE_TABLE, &args.b.scale_table, stream);
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
    args.offsets = (const int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
    args.tiles = (const int32_t *)gmm__part(plan, GMM__MMA_TILES);
    s = gmm__mma_enqueue_offsets(call, (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS),
                                 (int32_t *)gmm__part(plan, GMM__MMA_TILES), tile_rows, stream);
    if (s != GMM_OK || (s = gmm__mma_product_args(plan, op, &args, stream)) != GMM_OK) return s;
    groups = gmm__groups_at(&call->groups, args.offsets);
    if ((s = gmm__cuda_status(call, gmm__mma_gather(plan, op, &args, &groups, stream))) != GMM_OK) return s;
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
    if (call->mat[GMM__DB].dtype != GMM_NONE && !call->sums.wanted) gmm__reserve(plan, region, (size_t)size);
    return 1;
}

/* Enqueues the kernels of the bias gradient of a matrix `dy` with n columns. The rest of `args` is set. */
static gmm_status gmm__mma_enqueue_bgrad(const gmm__plan *plan, const gmm__mma_split *split, int dy, int64_t n,
                                         int table_region, gmm_bgrad_args *args, gmm_stream stream) {
    const gmm__call *call = plan->call;
    cudaError_t e = gmm__mma_operand(plan, dy, 0, 0, &args->dy, stream);
    if (e == cudaSuccess) e = gmm__mma_operand(plan, GMM__DB, 1, table_region, &args->db, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    args->offsets = split->offsets;
    args->tiles = split->tiles[GMM__TILES_128];
    args->groups = call->groups.count;
    args->n = (int32_t)n;
    args->capacity = call->rows;
    args->beta = call->grad[GMM__DB].beta;
    args->frozen = call->grad[GMM__DB].frozen;
    args->beta_all = gmm__mma_beta(&call->grad[GMM__DB]);
    return gmm__cuda_status(call, gmm_launch_bgrad(args->dy.dtype,
                                                   gmm__grid(call->ctx->device.processors, call->options.sm_limit, 8,
                                                             INT32_MAX), gmm__mma_pdl(call), args, stream));
}

static int gmm__mma_plan_linear_bgrad(const gmm__call *call, gmm__plan *plan) {
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, GMM__DB, GMM__MMA_MATRIX_TABLE);
    gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_BIAS_TABLE);
    if (call->sums.wanted) (void)snprintf(plan->note, sizeof plan->note, "adds the column sums of the cast");
    return gmm__mma_reserve_partials(call, plan, call->out, GMM__MMA_BGRAD_PARTIALS);
}

static gmm_status gmm__mma_launch_linear_bgrad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    gmm__mma_split split;
    gmm_bgrad_args args;
    const gmm_status s = gmm__mma_split_of(plan, GMM__TILES_128, NULL, &split, stream);
    cudaError_t e;

    memset(&args, 0, sizeof args);
    if (s != GMM_OK) return s;
    e = gmm__mma_operand(plan, GMM__BIAS, 1, GMM__MMA_BIAS_TABLE, &args.bias, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    if (call->mat[GMM__DB].dtype != GMM_NONE)
        args.partials = call->sums.wanted ? call->sums.partials : (float *)gmm__part(plan, GMM__MMA_BGRAD_PARTIALS);
    args.has_partials = call->sums.wanted;
    args.bias_scale = d->bias_scale;
    args.dy_index = gmm__row_index(call, GMM__DY);
    args.d_bias_scale = d->d_bias_scale;
    args.d_bias_scale_add = d->d_bias_scale_add;
    args.zero_tail = call->groups.tail == GMM_TAIL_ZERO;
    return gmm__mma_enqueue_bgrad(plan, &split, GMM__DY, call->out, GMM__MMA_MATRIX_TABLE, &args, stream);
}

#endif /* __CUDACC__ */

