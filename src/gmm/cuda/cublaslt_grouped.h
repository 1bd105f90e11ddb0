#ifdef GMM__CUBLASLT

/* cuBLASLt's grouped mode: one cublasLtMatmul for all groups, whose sizes, leading dimensions and addresses are arrays
   in device memory, which gmm_lt_groups writes. The mode is a matter of attributes: layouts whose batch mode is GROUPED
   have these arrays, and preferences have the average sizes, by which the heuristic chooses, in 8 bytes each, whatever
   cublasLt.h says. The attributes are given by number, since the headers of CUDA 13.0 do not name them. The functions
   that take them are as old as cuBLASLt, so that a program linked with an older library uses the mode if the library at
   run time has it.

   Hopper has the mode from cuBLASLt 13.4 on. It is used from 13.8 on: before, grouped products that reuse a workspace,
   as calls here do, may hang (by NVIDIA's notes until 13.6.0, by Transformer Engine until 13.7), and a query of the
   heuristic ends captures (13.5.1 to 13.6.0). Since no algorithm splits the contraction, no average size changed a bit
   of a result on 13.10 (tests: sizes far from the hint). Where alpha is in device memory, beta must be too. */

enum {
    GMM__LT_GROUPED_VERSION = 130800, /* the first that is used, as cublasLtGetVersion counts */
    GMM__LT_GROUPED = 2,              /* batch mode */
    /* attributes of layouts: batch mode; addresses of arrays; widths of their entries, int32, 0 = 32 bits */
    GMM__LT_BATCH_MODE = 8, GMM__LT_ROWS_ARRAY, GMM__LT_COLS_ARRAY, GMM__LT_LD_ARRAY, GMM__LT_SIZES_WIDTH,
    GMM__LT_LD_WIDTH
};

/* A grouped product as cuBLASLt describes it, on the stack; layouts by GMM_LT_A, _B and _D. */
typedef struct gmm__lt_grouped {
    cublasLtMatmulDescOpaque_t desc;
    uint64_t layout[GMM_LT_MATRICES][GMM__LT_OPAQUE];
} gmm__lt_grouped;

static cublasLtMatrixLayout_t gmm__lt_layout_at(gmm__lt_grouped *p, int matrix) {
    return (cublasLtMatrixLayout_t)(void *)p->layout[matrix];
}

/* Whether features and dtypes of a call with device sizes are those of the grouped mode. Alpha per group is not: on
   Hopper the mode has one alpha. Nor has it an epilogue, but 16-bit products have no bias in this engine. */
static int gmm__lt_check_grouped(const gmm__call *call, gmm__plan *plan) {
    const int version = (int)cublasLtGetVersion();
    const gmm_mat *a = &call->mat[gmm__lt_role_a(call->op)], *b = &call->mat[gmm__lt_role_b(call->op)];
    const gmm_mat *d = &call->mat[gmm__lt_role_d(call->op)];
    if (version < GMM__LT_GROUPED_VERSION)
        return gmm__decline(plan, "needs host sizes (groups.on_host): its grouped mode is used from cuBLASLt 13.8 on, "
                            "not in %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    if (call->ctx->device.capability != 90)
        return gmm__decline(plan, "needs host sizes (groups.on_host): its grouped mode is used on compute capability "
                            "9.0 alone");
    if (a->dtype == GMM_F32) return gmm__decline(plan, "multiplies f32 from host sizes alone (groups.on_host)");
    if (call->d.linear.alpha_per_group && (call->d.linear.alpha || call->query)) /* a query may have no alpha yet */
        return gmm__decline(plan, "has an alpha per group from host sizes alone (groups.on_host)");
    if (call->in % 8 || call->out % 8)
        return gmm__decline(plan, "takes device sizes with features at multiples of 8, not %lld and %lld",
                            (long long)call->in, (long long)call->out);
    if (a->ld > INT32_MAX || b->ld > INT32_MAX || d->ld > INT32_MAX)
        return gmm__decline(plan, "takes ld up to %d", INT32_MAX);
    return 1;
}

/* Whether D is zeroed where no group writes it: behind the last group, or in wgrad for an empty group. */
static int gmm__lt_zeroes(const gmm__call *call) {
    return call->op == GMM_OP_LINEAR_WGRAD ? gmm__cuda_beta(&call->grad[GMM__DW]) == 0.0f
                                           : call->groups.tail == GMM_TAIL_ZERO;
}
/* Bytes of an array that cuBLASLt reads, and array `i` of GMM_LT_ARRAY_COUNT. */
static size_t gmm__lt_array_bytes(const gmm__call *call) {
    return gmm__round256((size_t)call->groups.count * sizeof(void *));
}
static void *gmm__lt_array(const gmm__plan *plan, int i) {
    return (char *)gmm__region(plan, GMM__LT_ARRAYS) + (size_t)i * gmm__lt_array_bytes(plan->call);
}

/* Plans one grouped product. */
static int gmm__lt_plan_grouped(const gmm__call *call, gmm__plan *plan) {
    static const char *const names[GMM_OP_LINEAR_WGRAD - GMM_OP_LINEAR_FWD + 1][GMM_LT_MATRICES] = {
        { "w", "x", "y" }, { "w", "dy", "dx" }, { "x", "dy", "dw" }
    };
    const int wgrad = call->op == GMM_OP_LINEAR_WGRAD;
    const int roles[GMM_LT_MATRICES] = { gmm__lt_role_a(call->op), gmm__lt_role_b(call->op), gmm__lt_role_d(call->op) };
    const int64_t groups = call->groups.count;
    const int32_t processors = call->ctx->device.processors;
    int i;
    if (!gmm__lt_check_grouped(call, plan)) return 0;
    for (i = 0; i < GMM_LT_MATRICES; i++)
        if (!gmm__wgmma_check_alignment(call, roles[i], names[call->op - GMM_OP_LINEAR_FWD][i], plan)) return 0;
    plan->grid[0] = gmm__lt_zeroes(call) ? gmm__grid(processors, 0, GMM_LT_PER_SM, INT32_MAX)
                                         : gmm__grid(processors, 0, 1, gmm__ceil_div(groups, GMM_LT_THREADS));
    gmm__reserve(plan, GMM__LT_BETA, 2 * sizeof(float));
    gmm__reserve(plan, GMM__LT_WORKSPACE, (size_t)GMM__LT_WORKSPACE_BYTES);
    gmm__reserve(plan, GMM__LT_OFFSETS, (size_t)(groups + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__LT_ARRAYS, GMM_LT_ARRAY_COUNT * gmm__lt_array_bytes(call));
    gmm__cuda_reserve_table(call, plan, wgrad ? GMM__DW : GMM__W, GMM__LT_TABLE);
    (void)snprintf(plan->note, sizeof plan->note, "one grouped cublasLtMatmul, chosen for %lld rows per group; refused "
                   "where the library has no algorithm", (long long)gmm__cuda_rows_per_group(call));
    return 1;
}

/* Describes matrix A, B or D, of `rows` x `cols`: arrays of the plan. */
static cublasStatus_t gmm__lt_describe_matrix(const gmm__plan *plan, gmm__lt_grouped *p, int matrix, gmm_dtype dtype,
                                              int rows, int cols) {
    const cublasLtMatrixLayout_t layout = gmm__lt_layout_at(p, matrix);
    const int32_t mode = GMM__LT_GROUPED, width = 0, count = plan->call->groups.count;
    const void *const arrays[3] = { gmm__lt_array(plan, rows), gmm__lt_array(plan, cols),
                                    gmm__lt_array(plan, GMM_LT_LD + matrix) };
    const gmm__lt_value values[] = {
        { GMM__LT_BATCH_MODE, &mode, sizeof mode }, { CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count },
        { GMM__LT_ROWS_ARRAY, &arrays[0], sizeof arrays[0] }, { GMM__LT_COLS_ARRAY, &arrays[1], sizeof arrays[1] },
        { GMM__LT_LD_ARRAY, &arrays[2], sizeof arrays[2] }, { GMM__LT_SIZES_WIDTH, &width, sizeof width },
        { GMM__LT_LD_WIDTH, &width, sizeof width }
    };
    cublasStatus_t s = cublasLtMatrixLayoutInit_internal(layout, sizeof p->layout[matrix], gmm__lt_data_type(dtype), 0,
                                                         0, 0);
    size_t i;
    for (i = 0; i < sizeof values / sizeof values[0] && !s; i++)
        s = cublasLtMatrixLayoutSetAttribute(layout, (cublasLtMatrixLayoutAttribute_t)values[i].attribute,
                                             values[i].value, values[i].bytes);
    return s;
}

/* Describes the product of all groups. */
static cublasStatus_t gmm__lt_describe_grouped(const gmm__plan *plan, gmm__lt_grouped *p) {
    const gmm__call *call = plan->call;
    const gmm_op op = call->op;
    const gmm_dtype in = call->mat[gmm__lt_role_a(op)].dtype, out = call->mat[gmm__lt_role_d(op)].dtype;
    const int trans_a = op == GMM_OP_LINEAR_FWD, trans_b = op == GMM_OP_LINEAR_WGRAD;
    const int32_t op_a = trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t mode = CUBLASLT_POINTER_MODE_DEVICE;
    cublasStatus_t s = cublasLtMatmulDescInit(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!s) s = cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a);
    if (!s) s = cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b);
    if (!s) s = cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
    if (!s)
        s = gmm__lt_describe_matrix(plan, p, GMM_LT_A, in, trans_a ? GMM_LT_K : GMM_LT_M,
                                    trans_a ? GMM_LT_M : GMM_LT_K);
    if (!s)
        s = gmm__lt_describe_matrix(plan, p, GMM_LT_B, in, trans_b ? GMM_LT_N : GMM_LT_K,
                                    trans_b ? GMM_LT_K : GMM_LT_N);
    if (!s) s = gmm__lt_describe_matrix(plan, p, GMM_LT_D, out, GMM_LT_M, GMM_LT_N);
    return s;
}

/* Features that are rows of D in cuBLASLt's order; and its columns in wgrad, else the contraction. */
static int64_t gmm__lt_features_m(const gmm__call *call) {
    return call->op == GMM_OP_LINEAR_FWD ? call->out : call->in;
}
static int64_t gmm__lt_features_n(const gmm__call *call) {
    return call->op == GMM_OP_LINEAR_FWD ? call->in : call->out;
}

/* Algorithm of a described product: from the cache, where op + GMM_OP_COUNT + 1 marks grouped products, or from the
   heuristic. It depends on the features, the number of groups and the average rows. */
static cublasStatus_t gmm__lt_find_grouped(const gmm__call *call, gmm__lt_grouped *p,
                                           const cublasLtMatmulAlgo_t **algo) {
    const cublasLtMatrixLayout_t layout[GMM_LT_MATRICES] = {
        gmm__lt_layout_at(p, GMM_LT_A), gmm__lt_layout_at(p, GMM_LT_B), gmm__lt_layout_at(p, GMM_LT_D)
    };
    const int wgrad = call->op == GMM_OP_LINEAR_WGRAD;
    const int64_t tokens = gmm__cuda_rows_per_group(call), other = gmm__lt_features_n(call);
    const int64_t averages[3] = { gmm__lt_features_m(call), wgrad ? other : tokens, wgrad ? tokens : other };
    const uint32_t align[GMM_LT_MATRICES] = { 16, 16, 16 };
    int64_t key[GMM__LT_KEY] = { 0 };
    gmm__lt_choice *choice;
    cublasStatus_t s;
    int found;
    key[0] = (int64_t)call->op + GMM_OP_COUNT + 1;
    key[1] = (int64_t)call->mat[gmm__lt_role_a(call->op)].dtype << 8 | call->mat[gmm__lt_role_d(call->op)].dtype;
    key[2] = tokens;
    key[3] = call->in;
    key[4] = call->out;
    key[5] = call->groups.count;
    choice = gmm__lt_cached(call->ctx, key, &found);
    *algo = &choice->algo;
    if (found) return CUBLAS_STATUS_SUCCESS;
    s = gmm__lt_query_heuristic(call->ctx, &p->desc, layout, align, averages, &choice->algo);
    if (s == CUBLAS_STATUS_SUCCESS) memcpy(choice->key, key, sizeof key);
    return s;
}

/* Enqueues the row offsets of the groups, and the kernel that writes what cuBLASLt reads. */
static gmm_status gmm__lt_enqueue_arrays(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int wgrad = call->op == GMM_OP_LINEAR_WGRAD;
    const int roles[GMM_LT_MATRICES] = { gmm__lt_role_a(call->op), gmm__lt_role_b(call->op), gmm__lt_role_d(call->op) };
    int64_t *offsets = (int64_t *)gmm__region(plan, GMM__LT_OFFSETS);
    gmm_lt_args args;
    cudaError_t e = cudaSuccess;
    gmm_status s = gmm__cuda_enqueue_offsets(call, offsets, NULL, 0, stream);
    int i;
    if (s != GMM_OK) return s;
    memset(&args, 0, sizeof args);
    for (i = 0; i < GMM_LT_MATRICES && e == cudaSuccess; i++) {
        const int per_group = i == (wgrad ? GMM_LT_D : GMM_LT_A);
        e = gmm__cuda_operand(plan, roles[i], per_group, GMM__LT_TABLE, &args.matrix[i], stream);
    }
    for (i = 0; i < GMM_LT_ARRAY_COUNT; i++) args.array[i] = gmm__lt_array(plan, i);
    args.offsets = offsets;
    args.scalars = (float *)gmm__region(plan, GMM__LT_BETA);
    args.beta = wgrad ? gmm__cuda_beta(&call->grad[GMM__DW]) : call->d.linear.y_add ? 1.0f : 0.0f;
    args.groups = call->groups.count;
    args.wgrad = wgrad;
    args.rows = (int32_t)gmm__lt_features_m(call);
    args.cols = (int32_t)gmm__lt_features_n(call);
    args.zero = gmm__lt_zeroes(call);
    args.capacity = call->rows;
    if (e == cudaSuccess) e = gmm_launch_lt_groups(plan->grid[0], &args, stream);
    return gmm__cuda_status(call, e);
}

static gmm_status gmm__lt_launch_grouped(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const float *scalars = (const float *)gmm__region(plan, GMM__LT_BETA);
    const void *address[GMM_LT_MATRICES];
    const cublasLtMatmulAlgo_t *algo = NULL;
    gmm__lt_grouped p;
    gmm_status status;
    cublasStatus_t s = gmm__lt_describe_grouped(plan, &p);
    cublasLtMatrixLayout_t d;
    int i;
    if (s == CUBLAS_STATUS_SUCCESS && call->rows > 0) s = gmm__lt_find_grouped(call, &p, &algo);
    if (s == CUBLAS_STATUS_NOT_SUPPORTED)
        return gmm__refuse(call, GMM_E_UNSUPPORTED, "options.engine", "cublaslt has no algorithm for %d groups of %lld "
                           "rows on average", call->groups.count, (long long)gmm__cuda_rows_per_group(call));
    if (s != CUBLAS_STATUS_SUCCESS) return gmm__lt_status(call, s);
    status = gmm__lt_enqueue_arrays(plan, stream);
    if (status != GMM_OK || call->rows == 0) return status;
    for (i = 0; i < GMM_LT_MATRICES; i++) address[i] = gmm__lt_array(plan, GMM_LT_ADDRESS + i);
    d = gmm__lt_layout_at(&p, GMM_LT_D);
    return gmm__lt_status(call, cublasLtMatmul(
        call->ctx->lt.handle, &p.desc, call->d.linear.alpha ? call->d.linear.alpha : scalars, address[GMM_LT_A],
        gmm__lt_layout_at(&p, GMM_LT_A), address[GMM_LT_B], gmm__lt_layout_at(&p, GMM_LT_B), scalars + 1,
        address[GMM_LT_D], d, (void *)(uintptr_t)address[GMM_LT_D], d, algo, gmm__region(plan, GMM__LT_WORKSPACE),
        (size_t)GMM__LT_WORKSPACE_BYTES, stream));
}

/* --- the engine's functions --- */

static int gmm__lt_plan_product(const gmm__call *call, gmm__plan *plan) {
    const gmm_op op = call->op;
    const gmm_mat *a = &call->mat[gmm__lt_role_a(op)], *d = &call->mat[gmm__lt_role_d(op)];
    const gmm_mat *bias = &call->mat[GMM__BIAS];
    const gmm_mat *table = op == GMM_OP_LINEAR_WGRAD ? d : a; /* the operand with one matrix per group */
    if (!call->ctx->lt.handle)
        return gmm__decline(plan, call->ctx->config.engine == GMM_ENGINE_CUBLASLT
                                      ? "could not be opened on this device"
                                      : "is not open in this context: name it in gmm_config.engine or require_engine");
    if (call->rows > INT32_MAX || call->in > INT32_MAX || call->out > INT32_MAX)
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)INT32_MAX);
    if ((table->table && !(table->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) ||
        (bias->table && !(bias->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)))
        return gmm__decline(plan, "needs pointer tables on the host");
    if (d->dtype != a->dtype && d->dtype != GMM_F32)
        return gmm__decline(plan, "makes no %s from %s", gmm_dtype_name(d->dtype), gmm_dtype_name(a->dtype));
    if (bias->dtype != GMM_NONE && (a->dtype != GMM_F32 || bias->dtype != GMM_F32)) /* 16-bit sums are rounded first */
        return gmm__decline(plan, "adds no bias of %s to products of %s", gmm_dtype_name(bias->dtype),
                            gmm_dtype_name(a->dtype));
    return call->groups.on_host ? gmm__lt_plan_groups(call, plan) : gmm__lt_plan_grouped(call, plan);
}

static gmm_status gmm__lt_launch_product(const gmm__plan *plan, gmm_stream stream) {
    return plan->call->groups.on_host ? gmm__lt_launch_groups(plan, stream) : gmm__lt_launch_grouped(plan, stream);
}

#endif /* GMM__CUBLASLT */

