/* ........................................................................ 14.14 CUBLASLT engine: grouped linear ... */

#ifdef GMM__CUBLASLT

/* The CUBLASLT engine, a reference for the other engines: one cublasLtMatmul per group, for host sizes; for device
   sizes one of cuBLASLt's grouped mode (cublaslt_grouped.h). cuBLASLt's matrices are column-major; a row-major matrix
   is described as the column-major matrix that is its transpose, so that the engine computes D^T: its operand a is w,
   or x in wgrad, and b is x or dy. With host sizes the algorithm of a group depends on that group alone, never on the
   rows before it, and does not split the contraction: results are deterministic and do not depend on the other
   groups. */

/* Regions of the workspace: beta, or alpha and beta of a grouped product; the workspace of cuBLASLt; and for a grouped
   product [G + 1] int64 row offsets, the arrays that cuBLASLt reads, [G] addresses of a host table. */
enum { GMM__LT_BETA, GMM__LT_WORKSPACE, GMM__LT_OFFSETS, GMM__LT_ARRAYS, GMM__LT_TABLE };
enum { GMM__LT_WORKSPACE_BYTES = 32 << 20 };

/* One group's product as cuBLASLt describes it. Descriptors live on the stack: nothing is allocated. */
typedef struct gmm__lt_problem {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
    const void *a, *b, *bias;
    void *d;
    uint32_t align[GMM_LT_MATRICES], align_bias; /* bytes */
} gmm__lt_problem;

static cudaDataType_t gmm__lt_data_type(gmm_dtype dtype) {
    return dtype == GMM_BF16 ? CUDA_R_16BF : dtype == GMM_F16 ? CUDA_R_16F : CUDA_R_32F;
}

/* Common alignment of an address and a row pitch, at most 16 bytes. No algorithm gains from more, and the limit makes
   the choice independent of the rows before a group. */
static uint32_t gmm__lt_alignment(const void *address, int64_t row_bytes) {
    const uint64_t bits = (uintptr_t)address | (uint64_t)row_bytes | 16u;
    return (uint32_t)(bits & (~bits + 1u));
}

static gmm_status gmm__lt_status(const gmm__call *call, cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) return GMM_OK;
    return gmm__fail(&call->ctx->error, GMM_E_CUDA, "%s: cuBLASLt: %s (%s)", call->function,
                     cublasLtGetStatusString(status), call->shapes);
}

/* Creates the handle on the context's device. gmm_create does so only where its configuration names the engine:
   cuBLASLt waits for the device when a handle is made or destroyed, which ends captures of other threads. */
static int gmm__lt_open(gmm_context *ctx) {
    int current = 0;
    cudaError_t e = gmm__cuda_enter(ctx, &current);
    if (e != cudaSuccess || cublasLtCreate(&ctx->lt.handle) != CUBLAS_STATUS_SUCCESS) ctx->lt.handle = NULL;
    gmm__cuda_restore(ctx, current);
    (void)cudaGetLastError();
    return ctx->lt.handle != NULL;
}
static void gmm__lt_close(gmm_context *ctx) {
    if (ctx->lt.handle) (void)cublasLtDestroy(ctx->lt.handle);
}

/* Roles of the operands a, b and the result d of an operation. */
static int gmm__lt_role_a(gmm_op op) { return op == GMM_OP_LINEAR_WGRAD ? GMM__X_ : GMM__W; }
static int gmm__lt_role_b(gmm_op op) { return op == GMM_OP_LINEAR_FWD ? GMM__X_ : GMM__DY; }
static int gmm__lt_role_d(gmm_op op) {
    return op == GMM_OP_LINEAR_FWD ? GMM__Y : op == GMM_OP_LINEAR_DGRAD ? GMM__DX : GMM__DW;
}

static cublasStatus_t gmm__lt_layout(cublasLtMatrixLayoutOpaque_t *layout, const gmm_mat *m, int64_t rows,
                                     int64_t cols) {
    return cublasLtMatrixLayoutInit(layout, gmm__lt_data_type(m->dtype), (uint64_t)cols, (uint64_t)rows, m->ld);
}

/* Describes the product of group g with rows [row, row + rows), rows > 0. The caller sets the bias pointer before
   launch. */
static cublasStatus_t gmm__lt_describe_group(const gmm__call *call, int64_t g, int64_t row, int64_t rows,
                                             gmm__lt_problem *p) {
    const gmm_op op = call->op;
    const int wgrad = op == GMM_OP_LINEAR_WGRAD;
    const gmm_mat *a = &call->mat[gmm__lt_role_a(op)], *b = &call->mat[gmm__lt_role_b(op)];
    const gmm_mat *d = &call->mat[gmm__lt_role_d(op)], *bias = &call->mat[GMM__BIAS];
    const int32_t trans_a = op == GMM_OP_LINEAR_FWD ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t trans_b = wgrad ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t mode = call->d.linear.alpha ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
    const uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const int tf32 = a->dtype == GMM_F32 && call->options.allow_tf32;
    cublasStatus_t s;

    memset(p, 0, sizeof *p);
    p->a = gmm__at(a, wgrad ? 0 : g, wgrad ? row : 0, 0);
    p->b = gmm__at(b, 0, row, 0);
    p->d = gmm__at(d, wgrad ? g : 0, wgrad ? 0 : row, 0);
    p->align[GMM_LT_A] = gmm__lt_alignment(p->a, a->ld * (gmm_dtype_bits(a->dtype) / 8));
    p->align[GMM_LT_B] = gmm__lt_alignment(p->b, b->ld * (gmm_dtype_bits(b->dtype) / 8));
    p->align[GMM_LT_D] = gmm__lt_alignment(p->d, d->ld * (gmm_dtype_bits(d->dtype) / 8));
    s = cublasLtMatmulDescInit(&p->desc, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!s) s = cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &trans_a, sizeof trans_a);
    if (!s) s = cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &trans_b, sizeof trans_b);
    if (!s) s = cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
    if (!s) s = gmm__lt_layout(&p->a_layout, a, wgrad ? rows : call->out, call->in);
    if (!s) s = gmm__lt_layout(&p->b_layout, b, rows, op == GMM_OP_LINEAR_FWD ? call->in : call->out);
    if (!s)
        s = gmm__lt_layout(&p->d_layout, d, wgrad ? call->out : rows, op == GMM_OP_LINEAR_FWD ? call->out : call->in);
    if (s || bias->dtype == GMM_NONE) return s;
    p->bias = gmm__at(bias, g, 0, 0);
    p->align_bias = gmm__lt_alignment(p->bias, 0);
    return cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
}

static cublasStatus_t gmm__lt_set_bias(gmm__lt_problem *p, const void *bias) {
    if (!p->bias) return CUBLAS_STATUS_SUCCESS;
    return cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
}

/* A value of an attribute, given by number. */
typedef struct gmm__lt_value {
    int attribute;
    const void *value;
    size_t bytes;
} gmm__lt_value;

enum {
    /* preferences of the grouped mode: averages of the contraction, and of rows and columns of D, int64 */
    GMM__LT_AVERAGE_K = 13, GMM__LT_AVERAGE_M, GMM__LT_AVERAGE_N,
    /* 64-bit words of a layout or preference, whose types in older headers are too small for the grouped mode */
    GMM__LT_OPAQUE = 32
};

/* Queries the heuristic for the algorithm of a product. align: bytes to which addresses and columns of A, B and D are
   aligned. averages: m, n and k of an average group in the grouped mode, else zeros, and their attributes are not set.
   Algorithms that split the contraction are excluded, since the order in which they add partial sums is their own. */
static cublasStatus_t gmm__lt_query_heuristic(gmm_context *ctx, cublasLtMatmulDesc_t desc,
                                              const cublasLtMatrixLayout_t layout[GMM_LT_MATRICES],
                                              const uint32_t align[GMM_LT_MATRICES], const int64_t averages[3],
                                              cublasLtMatmulAlgo_t *algo) {
    const uint64_t max_bytes = GMM__LT_WORKSPACE_BYTES;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
    const gmm__lt_value values[] = {
        { CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &max_bytes, sizeof max_bytes },
        { CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align[GMM_LT_A], sizeof align[0] },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align[GMM_LT_B], sizeof align[0] },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align[GMM_LT_D], sizeof align[0] },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align[GMM_LT_D], sizeof align[0] },
        { GMM__LT_AVERAGE_M, &averages[0], sizeof averages[0] },
        { GMM__LT_AVERAGE_N, &averages[1], sizeof averages[0] },
        { GMM__LT_AVERAGE_K, &averages[2], sizeof averages[0] }
    };
    uint64_t words[GMM__LT_OPAQUE];
    const cublasLtMatmulPreference_t pref = (cublasLtMatmulPreference_t)(void *)words;
    const size_t count = sizeof values / sizeof values[0] - (averages[0] > 0 ? 0 : 3);
    cublasLtMatmulHeuristicResult_t result;
    cublasStatus_t s = cublasLtMatmulPreferenceInit_internal(pref, sizeof words);
    int found = 0;
    size_t i;
    for (i = 0; i < count && !s; i++)
        s = cublasLtMatmulPreferenceSetAttribute(pref, (cublasLtMatmulPreferenceAttributes_t)values[i].attribute,
                                                 values[i].value, values[i].bytes);
    memset(&result, 0, sizeof result);
    if (!s)
        s = cublasLtMatmulAlgoGetHeuristic(ctx->lt.handle, desc, layout[GMM_LT_A], layout[GMM_LT_B], layout[GMM_LT_D],
                                           layout[GMM_LT_D], pref, 1, &result, &found);
    if (!s) s = found > 0 ? result.state : CUBLAS_STATUS_NOT_SUPPORTED;
    *algo = result.algo;
    return s;
}

/* The entry of the cache for a key; *found: it holds the algorithm. Else the caller writes it, and then the key. */
static gmm__lt_choice *gmm__lt_cached(gmm_context *ctx, const int64_t key[GMM__LT_KEY], int *found) {
    gmm__lt_choice *choice;
    uint64_t hash = 0;
    int i;
    for (i = 0; i < GMM__LT_KEY; i++) {
        hash = (hash ^ (uint64_t)key[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    choice = &ctx->lt.cache[hash % GMM__LT_CACHE];
    *found = !memcmp(choice->key, key, sizeof choice->key);
    if (!*found) choice->key[0] = 0; /* the entry is empty until the heuristic has succeeded */
    return choice;
}

/* Algorithm for `rows` rows of a described group: from a direct-mapped cache, or from the heuristic. */
static cublasStatus_t gmm__lt_find_algorithm(const gmm__call *call, int64_t rows, gmm__lt_problem *p,
                                             const cublasLtMatmulAlgo_t **algo) {
    const gmm_mat *d = &call->mat[gmm__lt_role_d(call->op)], *a = &call->mat[gmm__lt_role_a(call->op)];
    const cublasLtMatrixLayout_t layout[GMM_LT_MATRICES] = { &p->a_layout, &p->b_layout, &p->d_layout };
    const int64_t averages[3] = { 0, 0, 0 };
    gmm__lt_choice *choice;
    int64_t key[GMM__LT_KEY];
    cublasStatus_t s;
    int found;
    key[0] = (int64_t)call->op + 1; /* 0 marks an empty entry */
    key[1] = (int64_t)a->dtype << 8 | (int64_t)d->dtype;
    key[2] = (call->d.linear.alpha ? 1 : 0) | (call->options.allow_tf32 ? 2 : 0) | (int64_t)p->align_bias << 2;
    key[3] = (int64_t)p->align[GMM_LT_A] << 16 | (int64_t)p->align[GMM_LT_B] << 8 | (int64_t)p->align[GMM_LT_D];
    key[4] = rows;
    key[5] = call->in;
    key[6] = call->out;
    key[7] = a->ld;
    key[8] = call->mat[gmm__lt_role_b(call->op)].ld;
    key[9] = d->ld;
    choice = gmm__lt_cached(call->ctx, key, &found);
    *algo = &choice->algo;
    if (found) return CUBLAS_STATUS_SUCCESS;
    /* the heuristic does not dereference the bias pointer, a value with the alignment of the bias */
    s = gmm__lt_set_bias(p, (const void *)(uintptr_t)p->align_bias);
    if (!s) s = gmm__lt_query_heuristic(call->ctx, &p->desc, layout, p->align, averages, &choice->algo);
    if (s == CUBLAS_STATUS_SUCCESS) memcpy(choice->key, key, sizeof key);
    return s;
}

/* Plans a product per group. */
static int gmm__lt_plan_groups(const gmm__call *call, gmm__plan *plan) {
    const gmm_dtype dtype = call->mat[gmm__lt_role_a(call->op)].dtype;
    gmm__reserve(plan, GMM__LT_BETA, sizeof(uint64_t)); /* reserved always, since a query may have no alpha yet */
    gmm__reserve(plan, GMM__LT_WORKSPACE, (size_t)GMM__LT_WORKSPACE_BYTES);
    (void)snprintf(plan->note, sizeof plan->note, "a cublasLtMatmul per group%s; refused where the library has no "
                   "algorithm for a group's rows and addresses",
                   dtype != GMM_F32 ? "" : call->options.allow_tf32 ? ", as TF32" : ", in fp32");
    return 1;
}

/* Zeroes rows of a matrix. */
static cudaError_t gmm__lt_zero_rows(const gmm_mat *m, void *address, int64_t rows, int64_t cols, gmm_stream stream) {
    const size_t size = (size_t)gmm_dtype_bits(m->dtype) / 8;
    if (rows <= 0) return cudaSuccess;
    return cudaMemset2DAsync(address, (size_t)m->ld * size, 0, (size_t)cols * size, (size_t)rows, stream);
}

static gmm_status gmm__lt_launch_groups(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *l = &call->d.linear;
    const int wgrad = call->op == GMM_OP_LINEAR_WGRAD;
    const gmm_mat *d = &call->mat[gmm__lt_role_d(call->op)];
    const int64_t cols = call->op == GMM_OP_LINEAR_FWD ? call->out : call->in;
    const float one = 1.0f, beta = wgrad ? gmm__cuda_beta(&call->grad[GMM__DW]) : l->y_add ? 1.0f : 0.0f;
    const float *beta_address = l->alpha ? (const float *)gmm__region(plan, GMM__LT_BETA) : &beta;
    const cublasLtMatmulAlgo_t *algo = NULL;
    gmm__lt_problem p;
    cudaError_t e = cudaSuccess;
    cublasStatus_t s;
    int64_t begin, end = 0, g;
    uint32_t fault = 0;
    int pass;

    if (gmm__capturing(call->ctx, stream))
        return gmm__refuse(call, GMM_E_CAPTURE, "groups.on_host", "host sizes cannot be captured, since every replay "
                           "would use them; pass device sizes");
    /* pass 0 finds the algorithms of all groups, so that a refused call has enqueued nothing; pass 1 launches */
    for (pass = 0; pass < 2; pass++) {
        if (pass == 1 && l->alpha) { /* alpha is in device memory, so beta must be too */
            uint64_t word = 0;
            memcpy(&word, &beta, sizeof beta);
            e = gmm_launch_copy(gmm__region(plan, GMM__LT_BETA), &word, 1, stream);
        }
        for (g = 0, end = 0; g < call->groups.count && e == cudaSuccess; g++) {
            begin = end;
            end = gmm_split_end(begin, gmm__split_value(&call->groups, g), call->groups.form, call->groups.capacity,
                                call->groups.row_align, &fault);
            if (begin == end) {
                if (pass == 1 && wgrad && beta == 0.0f)
                    e = gmm__lt_zero_rows(d, gmm__at(d, g, 0, 0), call->out, cols, stream);
                continue;
            }
            s = gmm__lt_describe_group(call, g, begin, end - begin, &p);
            if (s == CUBLAS_STATUS_SUCCESS) s = gmm__lt_find_algorithm(call, end - begin, &p, &algo);
            if (s == CUBLAS_STATUS_NOT_SUPPORTED)
                return gmm__refuse(call, GMM_E_UNSUPPORTED, "options.engine", "cublaslt has no algorithm for the %lld "
                                   "rows of group %lld", (long long)(end - begin), (long long)g);
            if (s == CUBLAS_STATUS_SUCCESS && pass == 1) s = gmm__lt_set_bias(&p, p.bias);
            if (s == CUBLAS_STATUS_SUCCESS && pass == 1)
                s = cublasLtMatmul(call->ctx->lt.handle, &p.desc,
                                   l->alpha ? l->alpha + (l->alpha_per_group ? g : 0) : &one, p.a, &p.a_layout, p.b,
                                   &p.b_layout, beta_address, p.d, &p.d_layout, p.d, &p.d_layout, algo,
                                   gmm__region(plan, GMM__LT_WORKSPACE), (size_t)GMM__LT_WORKSPACE_BYTES, stream);
            if (s != CUBLAS_STATUS_SUCCESS) return gmm__lt_status(call, s);
        }
    }
    if (e == cudaSuccess && !wgrad && call->groups.tail == GMM_TAIL_ZERO && end < call->rows)
        e = gmm__lt_zero_rows(d, gmm__at(d, 0, end, 0), call->rows - end, cols, stream);
    return gmm__cuda_status(call, e);
}

#endif /* GMM__CUBLASLT */

