/* ......................................................................... 14.16 Engine table, public functions ... */

/* One row per engine, in the order in which AUTO asks; the columns follow GMM_OP_LIST. */
#define GMM__OP(engine, op) GMM__OP_BY(engine, op, op)
#define GMM__OP_BY(engine, plan, op) { gmm__##engine##_plan_##plan, gmm__##engine##_launch_##op }
#define GMM__OP_ANY(engine, op) { gmm__plan_any, gmm__##engine##_launch_##op }
#define GMM__NO_OP { NULL, NULL }
static const gmm__engine_row gmm__engines[] = {
    { GMM_ENGINE_CPU, GMM_SPACE_CPU, 1, {
        GMM__OP(cpu, quantize), GMM__OP(cpu, dequantize),
        GMM__OP(cpu, quantize), /* requantize */
        GMM__OP_ANY(cpu, scale_update), GMM__OP_ANY(cpu, transpose), GMM__OP_ANY(cpu, shard_cast),
        GMM__OP_ANY(cpu, offsets),
        GMM__OP(cpu, product), /* linear_fwd */
        GMM__OP(cpu, product), /* linear_dgrad */
        GMM__OP(cpu, product), /* linear_wgrad */
        GMM__OP(cpu, linear_bgrad),
        GMM__OP_ANY(cpu, act), GMM__OP_ANY(cpu, act), /* fwd, bwd */
        GMM__OP(compose, mlp_fwd), GMM__OP(compose, mlp_bwd), GMM__OP(compose, mlp_wgrad),
        GMM__OP(cpu, topk_fwd), GMM__OP(cpu, topk_bwd),
        GMM__OP(cpu, permute_map), GMM__OP_ANY(cpu, permute_fwd), GMM__OP_ANY(cpu, permute_bwd),
        GMM__OP_ANY(cpu, unpermute_fwd), GMM__OP_ANY(cpu, unpermute_bwd),
        GMM__OP(cpu, pad), GMM__OP(cpu, pad), /* pad, unpad */
        GMM__OP_ANY(cpu, glu_interleave),
        GMM__OP_ANY(cpu, accumulate), GMM__OP_ANY(cpu, convert)
    } },
#ifdef __CUDACC__
    { GMM_ENGINE_WGMMA, GMM_SPACE_CUDA, 1, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__NO_OP, /* transpose */
        GMM__NO_OP, /* shard_cast */
        GMM__NO_OP, /* offsets */
        GMM__OP(wgmma, product), /* linear_fwd */
        GMM__OP(wgmma, product), /* linear_dgrad */
        GMM__OP(wgmma, product), /* linear_wgrad; no other operations */
        GMM__NO_OP
    } },
#endif
#if defined(__CUDACC__) && defined(GMM__ELEM_DONE)
    { GMM_ENGINE_MMA, GMM_SPACE_CUDA, 1, {
        GMM__OP(mma, quantize), GMM__OP(mma, dequantize),
        GMM__OP(mma, quantize), /* requantize */
        GMM__OP_ANY(mma, scale_update), GMM__OP(mma, transpose), GMM__OP_ANY(mma, shard_cast),
        GMM__OP_ANY(mma, offsets),
        GMM__OP(mma, linear_fwd), GMM__OP(mma, linear_dgrad), GMM__OP(mma, linear_wgrad), GMM__OP(mma, linear_bgrad),
        GMM__OP(mma, act), GMM__OP(mma, act), /* fwd, bwd */
        GMM__OP(compose, mlp_fwd), GMM__OP(compose, mlp_bwd), GMM__OP(compose, mlp_wgrad),
        GMM__OP(mma, topk_fwd), GMM__OP(mma, topk_bwd),
        GMM__OP(mma, permute_map), GMM__OP_BY(mma, permute, permute_fwd), GMM__OP_BY(mma, permute, permute_bwd),
        GMM__OP_BY(mma, permute, unpermute_fwd), GMM__OP_BY(mma, permute, unpermute_bwd),
        GMM__OP(mma, pad), GMM__OP(mma, pad), /* pad, unpad */
        GMM__OP(mma, glu_interleave),
        GMM__OP(mma, accumulate), GMM__OP(mma, convert)
    } },
#endif
#ifdef GMM__CUBLASLT
    { GMM_ENGINE_CUBLASLT, GMM_SPACE_CUDA, 0, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__NO_OP, /* transpose */
        GMM__NO_OP, /* shard_cast */
        GMM__NO_OP, /* offsets */
        GMM__OP(lt, product), /* linear_fwd */
        GMM__OP(lt, product), /* linear_dgrad */
        GMM__OP(lt, product), /* linear_wgrad; no other operations */
        GMM__NO_OP
    } },
#endif
};
#undef GMM__OP
#undef GMM__OP_BY
#undef GMM__OP_ANY
#undef GMM__NO_OP

/* Appends to a note, as far as it fits. */
static void gmm__note(gmm__plan *plan, const char *format, ...) {
    const size_t used = strlen(plan->note);
    va_list list;
    va_start(list, format);
    (void)vsnprintf(plan->note + used, sizeof plan->note - used, format, list);
    va_end(list);
}

/* Whether AUTO may ask a row for a call. */
static int gmm__automatic(const gmm__engine_row *row, const gmm__call *call) {
    return row->automatic && row->space == call->ctx->config.space && row->ops[call->op].plan;
}

/* Completes the plan of a query that left addresses open, made by rows[i]: the note says what it assumes of them, and
   the workspace is enough for the engine that AUTO asks next, which serves a call where that does not hold. */
static void gmm__cover_unaligned(const gmm__engine_row *rows, size_t count, size_t i, const gmm__call *call,
                                 gmm__plan *plan) {
    gmm__plan other;
    while (call->options.engine == GMM_ENGINE_AUTO && ++i < count) {
        if (!gmm__automatic(&rows[i], call)) continue;
        memset(&other, 0, sizeof other);
        other.call = call;
        other.engine = rows[i].engine;
        if (!rows[i].ops[call->op].plan(call, &other)) continue;
        if (other.workspace_bytes > plan->workspace_bytes) plan->workspace_bytes = other.workspace_bytes;
        if (other.assumes_aligned) continue;
        gmm__note(plan, "; for addresses at multiples of 16 bytes, else %s", gmm_engine_name(other.engine));
        return;
    }
    gmm__note(plan, "; only for addresses at multiples of 16 bytes");
}

/* gmm__select over the given engine table. */
static gmm_status gmm__select_from(const gmm__engine_row *rows, size_t count, gmm__call *call, gmm__plan *plan) {
    const gmm_engine wanted = call->options.engine;
    char declined[160] = "";
    size_t i, used = 0;
    for (i = 0; i < count; i++) {
        const gmm__engine_row *row = &rows[i];
        const char *why;
        if (wanted != GMM_ENGINE_AUTO ? row->engine != wanted : !gmm__automatic(row, call)) continue;
        memset(plan, 0, sizeof *plan);
        plan->call = call;
        plan->engine = row->engine;
        if (row->space != call->ctx->config.space) why = "serves another memory space";
        else if (!row->ops[call->op].plan) why = "does not have this operation";
        else if (row->ops[call->op].plan(call, plan)) {
            if (plan->assumes_aligned) gmm__cover_unaligned(rows, count, i, call, plan);
            if (declined[0]) gmm__note(plan, "%s%s", plan->note[0] ? "; " : "", declined);
            return GMM_OK;
        } else why = plan->note;
        used += (size_t)snprintf(declined + used, sizeof declined - used, "%s%s %.120s", used ? "; " : "",
                                 gmm_engine_name(row->engine), why);
        if (used >= sizeof declined) used = sizeof declined - 1;
    }
    return gmm__refuse(call, GMM_E_UNSUPPORTED, "options.engine", "%s cannot serve %s: %s", gmm_engine_name(wanted),
                       gmm_op_name(call->op), declined[0] ? declined : wanted == GMM_ENGINE_AUTO
                       ? "no engine of this build has it" : "this build does not hold that engine");
}

static gmm_status gmm__select(gmm__call *call, gmm__plan *plan) {
    return gmm__select_from(gmm__engines, sizeof gmm__engines / sizeof gmm__engines[0], call, plan);
}

static gmm_status gmm__launch_on(const gmm__plan *plan, gmm_stream stream) {
    size_t i;
    for (i = 0; i < sizeof gmm__engines / sizeof gmm__engines[0]; i++)
        if (gmm__engines[i].engine == plan->engine) return gmm__engines[i].ops[plan->call->op].launch(plan, stream);
    return GMM_E_UNSUPPORTED;
}

/* Launches on the context's device, whichever is current, and leaves that one current. */
static gmm_status gmm__launch(const gmm__plan *plan, gmm_stream stream) {
#ifdef __CUDACC__
    const gmm_context *ctx = plan->call->ctx;
    if (ctx->config.space == GMM_SPACE_CUDA) {
        int current = 0;
        cudaError_t e = cudaGetDevice(&current);
        gmm_status s;
        if (e == cudaSuccess && current != ctx->config.device) e = cudaSetDevice(ctx->config.device);
        if (e != cudaSuccess) return gmm__cuda_status(plan->call, e);
        s = gmm__launch_on(plan, stream);
        if (current != ctx->config.device) (void)cudaSetDevice(current);
        return s;
    }
#endif
    return gmm__launch_on(plan, stream);
}

static gmm_status gmm__serve(gmm__call *call, gmm_info *info, void *workspace, size_t workspace_bytes,
                             gmm_stream stream) {
    gmm__plan plan;
    gmm_status s;
    if (call->query && !info) return gmm__refuse(call, GMM_E_NULL, "info", "is NULL");
    if (call->query && info->struct_size > sizeof *info)
        return gmm__refuse(call, GMM_E_VERSION, "info", "struct_size %u is larger than the %u bytes of version %s",
                           info->struct_size, (unsigned)sizeof *info, GMM_VERSION_STRING);
    if ((s = gmm__select(call, &plan)) != GMM_OK) return s;
    if (call->query && info) {
        gmm_info full = GMM_ZERO;
        const uint32_t size = info->struct_size;
        full.struct_size = size;
        full.engine = plan.engine;
        full.workspace_bytes = plan.workspace_bytes;
        full.saved_bytes = plan.saved_bytes;
        full.deferred_bytes = plan.deferred_bytes;
        full.in_align = call->in_align ? call->in_align : 1;
        full.out_align = call->out_align ? call->out_align : 1;
        memcpy(full.note, plan.note, sizeof full.note);
        memcpy(info, &full, size ? size : sizeof full);
        return GMM_OK;
    }
    if (workspace_bytes < plan.workspace_bytes)
        return gmm__refuse(call, GMM_E_WORKSPACE, "workspace_bytes", "%llu must be >= %llu",
                           (unsigned long long)workspace_bytes, (unsigned long long)plan.workspace_bytes);
    if (!workspace && plan.workspace_bytes > 0)
        return gmm__refuse(call, GMM_E_NULL, "workspace", "is NULL for %llu bytes",
                           (unsigned long long)plan.workspace_bytes);
    if ((uintptr_t)workspace % GMM__WORKSPACE_ALIGN && plan.workspace_bytes > 0)
        return gmm__refuse(call, GMM_E_ALIGN, "workspace", "%p is not aligned to %d bytes", workspace,
                           (int)GMM__WORKSPACE_ALIGN);
    if (call->ctx->config.space == GMM_SPACE_CPU && stream)
        return gmm__refuse(call, GMM_E_ARG, "stream", "%p must be NULL in a CPU context", (void *)stream);
    plan.workspace = workspace;
    gmm__log(call->ctx, GMM_LOG_TRACE, "%s: served by %s%s%s%s%s%s", call->function, gmm_engine_name(plan.engine),
             plan.note[0] ? ": " : "", plan.note, call->shapes[0] ? " (" : "", call->shapes,
             call->shapes[0] ? ")" : "");
    return gmm__launch(&plan, stream);
}

GMMDEF gmm_status gmm_offsets(gmm_context *ctx, const gmm_groups *groups, int64_t *offsets, gmm_stream stream) {
    gmm__call call;
    gmm_groups g;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_OFFSETS, "gmm_offsets", 0);
    if (s != GMM_OK) return s;
    gmm__peek_groups(groups, &g);
    (void)snprintf(call.shapes, sizeof call.shapes, "G=%d T=%lld", (int)g.count, (long long)g.capacity);
    if ((s = gmm__read_options(&call, NULL)) != GMM_OK || (s = gmm__read_groups(&call, groups)) != GMM_OK) return s;
    if (!offsets) return gmm__refuse(&call, GMM_E_NULL, "offsets", "is NULL");
    if ((uintptr_t)offsets % 8)
        return gmm__refuse(&call, GMM_E_ALIGN, "offsets", "%p is not aligned to 8 bytes", (void *)offsets);
    call.output = offsets;
    return gmm__serve(&call, NULL, NULL, 0, stream);
}

