/* The runtime table: one row of functions per memory space, in the order of gmm_space. gmm_runtime_of copies a row to
   the caller. */
#define GMM__RT(row, entry) gmm__##row##_rt_##entry
static const gmm_runtime gmm__runtimes[] = {
    { 0, GMM_SPACE_CPU, NULL,
      GMM__RT(cpu, stream_create), GMM__RT(cpu, stream_destroy), GMM__RT(cpu, stream_wait), GMM__RT(cpu, stream_sync),
      GMM__RT(cpu, event_create), GMM__RT(cpu, event_destroy), GMM__RT(cpu, event_record), GMM__RT(cpu, event_query),
      GMM__RT(cpu, event_sync), GMM__RT(cpu, copy), GMM__RT(cpu, copy2d), GMM__RT(cpu, fill), GMM__RT(cpu, fill2d),
      GMM__RT(cpu, is_capturing), gmm__rt_run },
#ifdef __CUDACC__
    { 0, GMM_SPACE_CUDA, NULL,
      GMM__RT(cuda, stream_create), GMM__RT(cuda, stream_destroy), GMM__RT(cuda, stream_wait),
      GMM__RT(cuda, stream_sync), GMM__RT(cuda, event_create), GMM__RT(cuda, event_destroy),
      GMM__RT(cuda, event_record), GMM__RT(cuda, event_query), GMM__RT(cuda, event_sync), GMM__RT(cuda, copy),
      GMM__RT(cuda, copy2d), GMM__RT(cuda, fill), GMM__RT(cuda, fill2d), GMM__RT(cuda, is_capturing),
      gmm__rt_run },
#endif
};
#undef GMM__RT

GMMDEF gmm_status gmm_runtime_of(gmm_context *ctx, gmm_runtime *out) {
    gmm_runtime full;
    gmm_status s;
    char rule[96];
    uint32_t size;
    if (!ctx) return GMM_E_NULL;
    if (!out) return gmm__fail(&ctx->error, GMM_E_NULL, "gmm_runtime_of: out is NULL");
    size = out->struct_size;
    if ((s = gmm__check_size(size, sizeof full, rule)) != GMM_OK)
        return gmm__fail(&ctx->error, s, "gmm_runtime_of: out: %s", rule);
    full = gmm__runtimes[ctx->config.space];
    full.struct_size = size;
    full.self = ctx;
    memcpy(out, &full, size ? size : sizeof full);
    return GMM_OK;
}

