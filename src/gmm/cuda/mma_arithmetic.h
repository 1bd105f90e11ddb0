#ifdef __CUDACC__

/* --- accumulate, convert: plans and launches of the MMA engine --- */

/* Regions of the workspace of gmm_accumulate. */
enum { GMM__ACCUMULATE_SUM }; /* [rows, cols] float: sum of the addends of earlier launches */

static int gmm__mma_plan_convert(const gmm__call *call, gmm__plan *plan) {
    return call->rows <= INT32_MAX ? 1 : gmm__decline(plan, "takes at most %d rows", INT32_MAX);
}
/* A launch reads at most GMM__ELEM_ADDENDS addends; with more of them, the fp32 sum stays in the workspace between
   launches. */
static int gmm__mma_plan_accumulate(const gmm__call *call, gmm__plan *plan) {
    if (call->d.sum.count > GMM__ELEM_ADDENDS)
        gmm__reserve(plan, GMM__ACCUMULATE_SUM, (size_t)call->rows * (size_t)call->in * sizeof(float));
    return gmm__mma_plan_convert(call, plan);
}

static gmm_status gmm__mma_launch_accumulate(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_accumulation *d = &call->d.sum;
    cudaError_t e = cudaSuccess;
    gmm__accumulate_args a;
    gmm__view sum;
    int32_t first, j;
    memset(&a, 0, sizeof a);
    memset(&sum, 0, sizeof sum);
    sum.ld = call->in;
    sum.dtype = GMM_F32;
    sum.vec = call->in % 4 == 0;
    a.rows = call->rows;
    a.cols = call->in;
    for (first = 0; first < d->count && e == cudaSuccess; first += a.count) {
        const int last = d->count - first <= GMM__ELEM_ADDENDS;
        a.count = last ? d->count - first : (int32_t)GMM__ELEM_ADDENDS;
        a.x = gmm__mma_view(call, GMM__X_);
        for (j = 0; j < a.count; j++) { /* tables of addends are in host memory */
            a.addends[j] = (const char *)gmm__at(&call->mat[GMM__X_], first + j, 0, 0);
            a.x.vec &= ((uintptr_t)a.addends[j] & 15) == 0;
        }
        if (d->count > GMM__ELEM_ADDENDS) sum.data = gmm__region(plan, GMM__ACCUMULATE_SUM);
        if (first > 0) a.start = sum;
        a.y = last ? gmm__mma_view(call, GMM__Y) : sum;
        a.scale = last ? d->scale : 1.0f;
        a.beta = last ? d->beta : 0.0f;
        e = gmm__k_accumulate(&a, gmm__mma_streaming_limits(call), stream);
    }
    return gmm__cuda_status(call, e);
}

static gmm_status gmm__mma_launch_convert(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__convert_args a;
    memset(&a, 0, sizeof a);
    a.src = gmm__mma_view(call, GMM__X_);
    a.dst = gmm__mma_view(call, GMM__Y);
    a.rows = call->rows;
    a.cols = call->in;
    return gmm__cuda_status(call, gmm__k_convert(&a, gmm__mma_streaming_limits(call), stream));
}

#endif /* __CUDACC__ */
