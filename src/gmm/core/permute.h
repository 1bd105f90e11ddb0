/* Checks and entry points of gmm_permute_map, gmm_permute_fwd, gmm_permute_bwd, gmm_unpermute_fwd and
   gmm_unpermute_bwd. */

/* Checks what the five calls have in common, and describes the rows of each expert as a group of call->groups. */
static gmm_status gmm__read_permute(gmm__call *call, const gmm_permute *permute) {
    gmm_permute *p = &call->d.permute;
    int64_t slots;
    gmm_status s = gmm__read_descriptor(call, "permute", p, sizeof *p, permute);
    if (s != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d R=%lld H=%lld", (long long)p->tokens,
                   p->experts, p->topk, (long long)p->capacity, (long long)p->hidden);
    if ((s = gmm__read_options(call, p->options)) != GMM_OK) return s;
    if ((s = gmm__check_slots(call, p->experts, p->tokens, p->topk, &slots)) != GMM_OK) return s;
    if (p->capacity < 0 || p->capacity > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "capacity", "%lld must be >= 0 and < 2^31", (long long)p->capacity);
    if (p->hidden < 1) return gmm__refuse(call, GMM_E_ARG, "hidden", "%lld must be >= 1", (long long)p->hidden);
    if (p->align < 0) return gmm__refuse(call, GMM_E_ARG, "align", "%d must be >= 0", p->align);
    if (p->tail != GMM_TAIL_KEEP && p->tail != GMM_TAIL_ZERO)
        return gmm__refuse(call, GMM_E_ARG, "tail", "%d is neither keep (0) nor zero (1)", (int)p->tail);
    if (p->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", p->reserved);
    if (p->align == 0) p->align = 1;
    call->groups.count = p->experts;
    call->groups.capacity = p->capacity;
    call->groups.splits = p->sizes;
    call->groups.dtype = GMM_I32;
    call->groups.tail = p->tail;
    call->groups.fault = p->fault;
    call->rows = p->capacity;
    return gmm__check_output(call, "fault", p->fault, 0, 1);
}

/* Reads a matrix of `rows` x hidden. */
static gmm_status gmm__permute_mat(gmm__call *call, int role, const char *argument, const gmm_mat *mat, int64_t rows,
                                   uint32_t dtypes) {
    return gmm__read_mat(call, role, argument, mat, 1, gmm__matrix(rows, call->d.permute.hidden), dtypes);
}

/* Refuses an operand that belongs to another of the five operations: the caller has called the wrong one. */
static gmm_status gmm__refuse_foreign_operands(gmm__call *call) {
    enum { FWD = 1, BWD = 2, UNPERMUTE_FWD = 4, UNPERMUTE_BWD = 8 };
    static const gmm_op ops[] = { GMM_OP_PERMUTE_FWD, GMM_OP_PERMUTE_BWD, GMM_OP_UNPERMUTE_FWD, GMM_OP_UNPERMUTE_BWD };
    const gmm_permute *p = &call->d.permute;
    const struct { const char *name; const void *address; int calls; } operands[] = {
        { "x", p->x, FWD }, { "probs", p->probs, FWD | UNPERMUTE_FWD | UNPERMUTE_BWD },
        { "rows", p->rows, FWD | UNPERMUTE_FWD | UNPERMUTE_BWD }, { "row_probs", p->row_probs, FWD },
        { "out", p->out, UNPERMUTE_FWD }, { "dout", p->dout, UNPERMUTE_BWD },
        { "drows", p->drows, BWD | UNPERMUTE_BWD }, { "drow_probs", p->drow_probs, BWD }, { "dx", p->dx, BWD },
        { "dprobs", p->dprobs, BWD | UNPERMUTE_BWD }
    };
    size_t i, k, length;
    int call_bit = 0;
    char calls_text[80];
    for (k = 0; k < sizeof ops / sizeof ops[0]; k++)
        if (ops[k] == call->op) call_bit = 1 << k;
    for (i = 0; i < sizeof operands / sizeof operands[0]; i++) {
        if (!operands[i].address || operands[i].calls & call_bit) continue;
        for (k = length = 0; k < sizeof ops / sizeof ops[0]; k++)
            if (operands[i].calls >> k & 1)
                length += (size_t)snprintf(calls_text + length, sizeof calls_text - length, "%s%s", length ? ", " : "",
                                           gmm_op_name(ops[k]));
        return gmm__refuse_that(call, GMM_E_CONFIG, operands[i].name, "is set and must be NULL: %s neither reads nor "
                                "writes it, only %s", gmm_op_name(call->op), calls_text);
    }
    return GMM_OK;
}

/* Reads the operands of one of the five calls. An optional output that is given requires its inputs. */
static gmm_status gmm__read_permute_operands(gmm__call *call) {
    const gmm_permute *p = &call->d.permute;
    const int64_t slots = p->tokens * p->topk;
    const uint32_t dtypes = (uint32_t)GMM__FLOATS | 1u << GMM_E4M3 | 1u << GMM_E5M2 | 1u << GMM_U8;
    gmm_status s = GMM_OK;
    switch (call->op) {
    case GMM_OP_PERMUTE_MAP:
        if (!p->row_of && !p->slot_of && !p->sizes && !call->query)
            return gmm__refuse_that(call, GMM_E_NULL, "row_of", "is NULL, and so are permute.slot_of and "
                                    "permute.sizes: nothing is asked for");
        if ((s = gmm__check_array(call, "indices", p->indices, 1, slots)) != GMM_OK ||
            (s = gmm__check_output(call, "row_of", p->row_of, 0, slots)) != GMM_OK ||
            (s = gmm__check_output(call, "slot_of", p->slot_of, 0, p->capacity)) != GMM_OK)
            return s;
        return gmm__check_output(call, "sizes", p->sizes, 0, p->experts);
    case GMM_OP_PERMUTE_FWD:
        if ((p->x || p->rows || !p->row_probs) && /* row_probs may be asked for alone */
            ((s = gmm__permute_mat(call, GMM__X_, "x", p->x, p->tokens, dtypes)) != GMM_OK ||
             (s = gmm__permute_mat(call, GMM__ROWS, "rows", p->rows, p->capacity, dtypes)) != GMM_OK))
            return s;
        if (call->mat[GMM__X_].dtype != call->mat[GMM__ROWS].dtype)
            return gmm__refuse(call, GMM_E_DTYPE, "rows", "dtype %s must be that of permute.x, %s",
                               gmm_dtype_name(call->mat[GMM__ROWS].dtype), gmm_dtype_name(call->mat[GMM__X_].dtype));
        if ((s = gmm__check_array(call, "slot_of", p->slot_of, 1, p->capacity)) != GMM_OK ||
            (s = gmm__check_array(call, "row_of", p->row_of, 0, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "sizes", p->sizes, 1, p->experts)) != GMM_OK ||
            (s = gmm__check_output(call, "row_probs", p->row_probs, 0, p->capacity)) != GMM_OK)
            return s;
        return gmm__check_array(call, "probs", p->probs, p->row_probs != NULL, slots);
    case GMM_OP_PERMUTE_BWD:
        if (!p->dx && !p->dprobs && !call->query)
            return gmm__refuse_that(call, GMM_E_NULL, "dx", "is NULL, and so is permute.dprobs: nothing is asked for");
        if (p->dx && ((s = gmm__permute_mat(call, GMM__DX, "dx", p->dx, p->tokens, GMM__FLOATS)) != GMM_OK ||
                      (s = gmm__permute_mat(call, GMM__DROWS, "drows", p->drows, p->capacity, GMM__FLOATS)) != GMM_OK))
            return s;
        if ((s = gmm__check_array(call, "row_of", p->row_of, 1, slots)) != GMM_OK ||
            (s = gmm__check_output(call, "dprobs", p->dprobs, 0, slots)) != GMM_OK)
            return s;
        return gmm__check_array(call, "drow_probs", p->drow_probs, p->dprobs != NULL, p->capacity);
    case GMM_OP_UNPERMUTE_FWD:
        if ((s = gmm__permute_mat(call, GMM__ROWS, "rows", p->rows, p->capacity, GMM__FLOATS)) != GMM_OK ||
            (s = gmm__permute_mat(call, GMM__OUT, "out", p->out, p->tokens, GMM__FLOATS)) != GMM_OK ||
            (s = gmm__check_array(call, "row_of", p->row_of, 1, slots)) != GMM_OK)
            return s;
        return gmm__check_array(call, "probs", p->probs, 0, slots);
    case GMM_OP_UNPERMUTE_BWD:
        if (!p->drows && !p->dprobs && !call->query)
            return gmm__refuse_that(call, GMM_E_NULL, "drows", "is NULL, and so is permute.dprobs: nothing is asked "
                                    "for");
        if ((s = gmm__permute_mat(call, GMM__DOUT, "dout", p->dout, p->tokens, GMM__FLOATS)) != GMM_OK) return s;
        if (p->drows &&
            ((s = gmm__permute_mat(call, GMM__DROWS, "drows", p->drows, p->capacity, GMM__FLOATS)) != GMM_OK ||
             (s = gmm__check_array(call, "slot_of", p->slot_of, 1, p->capacity)) != GMM_OK ||
             (s = gmm__check_array(call, "row_of", p->row_of, 0, slots)) != GMM_OK ||
             (s = gmm__check_array(call, "sizes", p->sizes, 1, p->experts)) != GMM_OK))
            return s;
        if (p->dprobs &&
            ((s = gmm__permute_mat(call, GMM__ROWS, "rows", p->rows, p->capacity, GMM__FLOATS)) != GMM_OK ||
             (s = gmm__check_array(call, "row_of", p->row_of, 1, slots)) != GMM_OK ||
             (s = gmm__check_output(call, "dprobs", p->dprobs, 1, slots)) != GMM_OK))
            return s;
        return gmm__check_array(call, "probs", p->probs, 0, slots);
    default: return gmm__refuse(call, GMM_E_ARG, "op", "%s is no permutation", gmm_op_name(call->op));
    }
}

static gmm_status gmm__permute_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                       const gmm_permute *permute, int query) {
    gmm_status s = gmm__open(call, ctx, op, function, query);
    if (s != GMM_OK || (s = gmm__read_permute(call, permute)) != GMM_OK ||
        (s = gmm__read_permute_operands(call)) != GMM_OK || (s = gmm__refuse_foreign_operands(call)) != GMM_OK)
        return s;
    if (query || (op != GMM_OP_PERMUTE_FWD && (op != GMM_OP_UNPERMUTE_BWD || !permute->drows))) return GMM_OK;
    return gmm__check_split(call, "sizes");
}

static gmm_status gmm__permute_run(gmm_context *ctx, gmm_op op, const char *function, const gmm_permute *permute,
                                   void *workspace, size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__permute_prepare(&call, ctx, op, function, permute, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_permute_query(gmm_context *ctx, gmm_op op, const gmm_permute *permute, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__permute_prepare(&call, ctx, op, "gmm_permute_query", permute, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}

GMMDEF gmm_status gmm_permute_map(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_PERMUTE_MAP, "gmm_permute_map", permute, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_permute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_PERMUTE_FWD, "gmm_permute_fwd", permute, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_permute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_PERMUTE_BWD, "gmm_permute_bwd", permute, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_unpermute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_UNPERMUTE_FWD, "gmm_unpermute_fwd", permute, workspace, workspace_bytes,
                            stream);
}

GMMDEF gmm_status gmm_unpermute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_UNPERMUTE_BWD, "gmm_unpermute_bwd", permute, workspace, workspace_bytes,
                            stream);
}

