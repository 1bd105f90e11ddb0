/* ................................................................. 14.11 CUDA engines: common, grouped linear ... */

#ifdef __CUDACC__

/* What the engines MMA, WGMMA and CUBLASLT have in common (gmm__cuda_*): errors of CUDA, regions of the workspace,
   copies of host tables, the split on the device, roles and arguments of products, rows that are copied together. */

/* Regions of the workspace. Row offsets and prefix sums belong to all operations with groups, the others to linear
   layers; operations of other families have regions of their own, which begin behind those that they use of these. */
enum {
    GMM__ROW_OFFSETS,         /* [G + 1] int64: row offsets of the groups */
    GMM__TILE_SUMS,           /* [G + 1] int32: prefix sums of the groups' tiles */
    GMM__MATRIX_TABLE,        /* [G] device copies of host tables: addresses of w, dw or db */
    GMM__BIAS_TABLE,          /* [G] addresses of biases */
    GMM__SCALE_TABLE,         /* [G] addresses of the weights' scales */
    GMM__BGRAD_PARTIALS,      /* [strips, out] float: partial sums of the bias gradient */
    GMM__COPY_A,              /* copies of operands: gathered rows; WGMMA: quantized ones as 16-bit elements */
    GMM__COPY_B,
    GMM__WGMMA_ALPHA,         /* [2][G] float: two scales of each group's accumulators, applied in this order */
    GMM__WGMMA_TILES16,       /* [G + 1] int32: prefix sums of the groups' blocks of 16 rows, for transposed tokens */
    GMM__WGMMA_DOTS,          /* [ceil(ffn / GMM_ACT_DOT_COLS)][rows] float: parts of dprob, which a dgrad writes */
    GMM__WGMMA_OFFSETS16,     /* [G + 1] int64: row offsets of groups padded to multiples of 16 rows */
    GMM__CUDA_REGIONS,
    GMM__WGMMA_GROUP_TABLES = GMM__BGRAD_PARTIALS /* group tables of each CTA; no operation needs both regions */
};
typedef char gmm__cuda_regions_fit[(int)GMM__CUDA_REGIONS <= (int)GMM__REGIONS ? 1 : -1];

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
static gmm_groups gmm__cuda_groups_at(const gmm_groups *groups, const int64_t *offsets) {
    gmm_groups g = *groups;
    g.splits = offsets;
    g.form = GMM_SPLIT_OFFSETS;
    g.dtype = GMM_I64;
    g.on_host = g.row_align = 0;
    return g;
}

/* Sets *table to `source`, or to its copy in `region` of the workspace if the tables of `m` are in host memory. */
static cudaError_t gmm__cuda_device_table(const gmm__plan *plan, const gmm_mat *m, void *const *source, int64_t count,
                                          int region, void *const **table, gmm_stream stream) {
    *table = source;
    if (!source || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return cudaSuccess;
    *table = (void *const *)gmm__region(plan, region);
    return gmm_launch_copy(gmm__region(plan, region), source, count, stream);
}

/* Reserves the row offsets and the prefix sums of the tiles of so many groups. */
static void gmm__cuda_reserve_split(gmm__plan *plan, int64_t groups) {
    gmm__reserve(plan, GMM__ROW_OFFSETS, (size_t)(groups + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__TILE_SUMS, (size_t)(groups + 1) * sizeof(int32_t));
}
/* Reserves a region for the device copy of an operand's table, if that is in host memory. */
static void gmm__cuda_reserve_table(const gmm__call *call, gmm__plan *plan, int role, int region) {
    if (call->mat[role].dtype != GMM_NONE && (call->mat[role].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
        gmm__reserve(plan, region, (size_t)call->groups.count * sizeof(void *));
}

/* Whether a call's kernels use programmatic dependent launch. With options.sm_limit they do not: CTAs of the dependent
   kernel would wait on the multiprocessors that the caller keeps free for other kernels. */
static int gmm__cuda_pdl(const gmm__call *call) { return call->ctx->device.pdl && call->options.sm_limit == 0; }

/* Enqueues the computation of a call's row offsets, and of the prefix sums of its tiles, to the addresses in `args`.
   Offsets of a split on the host are computed here and copied to the device; a kernel computes all others. */
static gmm_status gmm__cuda_enqueue_split(const gmm__call *call, gmm_offsets_args *args, gmm_stream stream) {
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
    return gmm__cuda_status(call, gmm_launch_offsets(args, gmm__cuda_pdl(call), stream));
}

/* The same to `offsets` and, unless it is NULL, `tiles`: prefix sums of the groups' tiles of tile_rows rows. */
static gmm_status gmm__cuda_enqueue_offsets(const gmm__call *call, int64_t *offsets, int32_t *tiles, int32_t tile_rows,
                                            gmm_stream stream) {
    gmm_offsets_args args;
    memset(&args, 0, sizeof args);
    args.offsets = offsets;
    args.tiles[0] = tiles;
    args.tile_rows[0] = tile_rows;
    return gmm__cuda_enqueue_split(call, &args, stream);
}

/* Rows of a tile by gmm__tile_kind. */
static const int32_t gmm__tile_rows[GMM__TILE_KINDS] = { GMM_TILE, 16 };
typedef char gmm__tile_kinds_fit[(int)GMM__TILE_KINDS == (int)GMM_OFFSETS_TILES ? 1 : -1];

/* The offsets of a call's groups and the prefix sums of their tiles. */
typedef struct gmm__cuda_split {
    const int64_t *offsets;
    const int32_t *tiles[GMM__TILE_KINDS];
} gmm__cuda_split;

/* The split of a call. Steps of an MLP share the one that the MLP has computed (call->split_tiles); for other calls
   this enqueues the computation into the workspace, with the prefix sums of one kind of tile, and those of 16 rows to
   `tiles16` unless that is NULL. Products of MMA compute splits of their own, since their tiles have other heights. */
static gmm_status gmm__cuda_split_of(const gmm__plan *plan, enum gmm__tile_kind kind, int32_t *tiles16,
                                     gmm__cuda_split *split, gmm_stream stream) {
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
    args.offsets = (int64_t *)gmm__region(plan, GMM__ROW_OFFSETS);
    args.tiles[kind] = (int32_t *)gmm__region(plan, GMM__TILE_SUMS);
    if (tiles16) args.tiles[GMM__TILES_16] = tiles16;
    memcpy(args.tile_rows, gmm__tile_rows, sizeof args.tile_rows);
    split->offsets = args.offsets;
    for (k = 0; k < GMM__TILE_KINDS; k++) split->tiles[k] = args.tiles[k];
    return gmm__cuda_enqueue_split(call, &args, stream);
}

/* Describes an operand to kernels; `per_group`: it has one matrix per group. A host table is copied to `region` of the
   workspace. */
static cudaError_t gmm__cuda_operand(const gmm__plan *plan, int role, int per_group, int region, gmm_kmat *out,
                                     gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    memset(out, 0, sizeof *out);
    out->dtype = m->dtype;
    out->data = m->data;
    out->table = m->table;
    out->ld = m->ld;
    out->stride = per_group ? m->group_stride * (gmm_dtype_bits(m->dtype) / 8) : 0;
    if (m->dtype == GMM_NONE) return cudaSuccess;
    return gmm__cuda_device_table(plan, m, m->table, plan->call->groups.count, region, &out->table, stream);
}

/* beta of all groups of a gradient's destination, 0 or 1, where it has no array of betas by group. */
static float gmm__cuda_beta(const gmm_grad *grad) {
    gmm_grad g = *grad;
    g.beta = NULL; /* device memory: the kernels read it */
    return gmm__grad_beta(&g, 0);
}

/* Roles of the operands of the product D = A B^T, which has M rows, N columns and the contraction K: fwd multiplies x
   by w, dgrad dy by w, wgrad dy by x. */
static int gmm__cuda_role_a(gmm_gemm_op op) { return op == gmm_gemm_fwd ? GMM__X_ : GMM__DY; }
static int gmm__cuda_role_b(gmm_gemm_op op) { return op == gmm_gemm_wgrad ? GMM__X_ : GMM__W; }
static int gmm__cuda_role_d(gmm_gemm_op op) {
    return op == gmm_gemm_fwd ? GMM__Y : op == gmm_gemm_dgrad ? GMM__DX : GMM__DW;
}

/* Reserves what every product needs: the split, and device copies of host tables. */
static void gmm__cuda_reserve_product(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int wgrad = op == gmm_gemm_wgrad;
    gmm__cuda_reserve_split(plan, call->groups.count);
    gmm__cuda_reserve_table(call, plan, wgrad ? GMM__DW : GMM__W, GMM__MATRIX_TABLE);
    if (!wgrad && call->mat[GMM__W].scaling != GMM_SCALING_NONE)
        gmm__cuda_reserve_table(call, plan, GMM__W, GMM__SCALE_TABLE);
    if (op == gmm_gemm_fwd) gmm__cuda_reserve_table(call, plan, GMM__BIAS, GMM__BIAS_TABLE);
}

/* The index by which kernels gather rows of a matrix that has `rows` rows; at NULL: they do not. */
static gmm_row_index gmm__cuda_row_index(const gmm__call *call, const int32_t *at, int64_t rows, int32_t div) {
    gmm_row_index index;
    index.at = at;
    index.fault = call->groups.fault;
    index.div = div;
    index.rows = (int32_t)rows;
    return index;
}
/* The index of an operand of a linear call whose rows are gathered, else NULL. */
static const int32_t *gmm__cuda_index_of(const gmm__call *call, int role) {
    return role == GMM__X_ ? call->d.linear.x_index : role == GMM__DY ? call->d.linear.dy_index : NULL;
}
static gmm_row_index gmm__cuda_linear_index(const gmm__call *call, int role) {
    const gmm_linear *d = &call->d.linear;
    return gmm__cuda_row_index(call, gmm__cuda_index_of(call, role), d->index_rows, d->index_div);
}
/* Bytes from row to row of an operand's gathered copy in the workspace; 0: the rows are not gathered. */
static int64_t gmm__cuda_copy_pitch(const gmm__call *call, int role) {
    const int64_t cols = role == GMM__X_ ? call->in : call->out, size = gmm_dtype_bits(call->mat[role].dtype) / 8;
    return gmm__cuda_index_of(call, role) ? (cols * size + 15) / 16 * 16 : 0;
}
/* Reserves the copies of gathered operands, the last regions of a plan, and says so in the note. Declines what
   options.workspace_limit forbids. */
static int gmm__cuda_plan_gather(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int64_t pitch_a = gmm__cuda_copy_pitch(call, gmm__cuda_role_a(op));
    const int64_t pitch_b = gmm__cuda_copy_pitch(call, gmm__cuda_role_b(op));
    const size_t used = strlen(plan->note);
    int64_t bytes;
    if (pitch_a + pitch_b == 0) return 1;
    if (!gmm__mul(call->rows, pitch_a + pitch_b, &bytes))
        return gmm__decline(plan, "copies no %lld rows of %lld bytes", (long long)call->rows,
                            (long long)(pitch_a + pitch_b));
    plan->grid[1] = gmm__grid(call->ctx->device.processors, call->options.sm_limit, GMM_GATHER_PER_SM, INT32_MAX);
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
static cudaError_t gmm__cuda_gather(const gmm__plan *plan, gmm_gemm_op op, gmm_gemm_args *args,
                                    const gmm_groups *groups, gmm_stream stream) {
    const gmm__call *call = plan->call;
    cudaError_t e = cudaSuccess;
    int operand;
    for (operand = 0; operand < 2 && e == cudaSuccess; operand++) {
        const int role = operand ? gmm__cuda_role_b(op) : gmm__cuda_role_a(op);
        const int64_t pitch = gmm__cuda_copy_pitch(call, role), size = gmm_dtype_bits(call->mat[role].dtype) / 8;
        gmm_kmat *m = operand ? &args->b : &args->a;
        gmm_gather_args copy;
        if (!pitch) continue;
        memset(&copy, 0, sizeof copy);
        copy.src = (const char *)m->data;
        copy.dst = (char *)gmm__region(plan, operand ? GMM__COPY_B : GMM__COPY_A);
        copy.ld = m->ld * size;
        copy.pitch = pitch;
        copy.bytes = (role == GMM__X_ ? call->in : call->out) * size;
        copy.index = gmm__cuda_linear_index(call, role);
        copy.groups = *groups;
        e = gmm_launch_gather(plan->grid[1], gmm__cuda_pdl(call), &copy, stream);
        m->data = copy.dst;
        m->ld = pitch / size;
    }
    return e;
}

/* Rows of all groups together for which a plan is made: groups.rows_hint, or else the capacity. */
static int64_t gmm__cuda_expected_rows(const gmm__call *call) {
    const int64_t hint = call->groups.rows_hint;
    return hint > 0 && hint < call->rows ? hint : call->rows;
}
/* The same of one group, on average. */
static int64_t gmm__cuda_rows_per_group(const gmm__call *call) {
    return gmm__ceil_div(gmm__cuda_expected_rows(call), (int64_t)call->groups.count);
}

/* Fills in the arguments of a product except offsets and tiles, and enqueues the copies of host tables. M, N and K of
   wgrad are out_features, in_features and the rows of a group, which the kernel reads from the offsets. */
static gmm_status gmm__cuda_product_args(const gmm__plan *plan, gmm_gemm_op op, gmm_gemm_args *args,
                                         gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    const int fwd = op == gmm_gemm_fwd, wgrad = op == gmm_gemm_wgrad;
    cudaError_t e = gmm__cuda_operand(plan, gmm__cuda_role_a(op), 0, 0, &args->a, stream);
    if (e == cudaSuccess)
        e = gmm__cuda_operand(plan, gmm__cuda_role_b(op), !wgrad, GMM__MATRIX_TABLE, &args->b, stream);
    if (e == cudaSuccess)
        e = gmm__cuda_operand(plan, gmm__cuda_role_d(op), wgrad, GMM__MATRIX_TABLE, &args->d, stream);
    if (e == cudaSuccess && fwd) e = gmm__cuda_operand(plan, GMM__BIAS, 1, GMM__BIAS_TABLE, &args->bias, stream);
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
        args->beta_all = gmm__cuda_beta(&call->grad[GMM__DW]);
    }
    return gmm__cuda_status(call, e);
}

#endif /* __CUDACC__ */
