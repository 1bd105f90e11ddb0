/* GMM__BODY_PRODUCT, continued: the epilogue of a consumer warp group. Threads hold accumulators as gmm_wgmma_acc_m
   (columns of D) and gmm_wgmma_acc_n (rows of D) say; stores transpose them through shared memory. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Multiplies the accumulators by the alphas of the tile's group. An empty sum stays +0, whatever they are. */
GMM__DEVICE void GMM__PART(gmm_sm90_scale_accumulators_)(const GMM__ARGS *args, const gmm_sm90_tile *t,
                                                         float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    int j, u, x;
#pragma unroll 1
    for (x = 0; x < 2; x++) {
        const float *const alphas = x ? args->alpha2 : args->p.alpha;
        const float alpha = alphas && t->k > 0 ? alphas[args->p.alpha_per_group ? t->g : 0] : 1.0f;
        if (alpha != 1.0f) {
#pragma unroll
            for (j = 0; j < GMM__CFG(wgmma_m); j++)
#pragma unroll
                for (u = 0; u < 8 * GMM__CFG(m16); u++) acc[j][u] = __fmul_rn(acc[j][u], alpha);
        }
    }
}

/* Applies an epilogue step to the accumulators. col0: the warp group's first column in the tile. A thread has two
   columns of each block of 64; of the tile's rows it has two in each unit of 8, whose values come from other lanes. */
GMM__DEVICE void GMM__PART(gmm_sm90_apply_step_)(const gmm_epilogue_step step, const GMM__ARGS *args,
                                                 const gmm_sm90_tile *t, int col0,
                                                 float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const gmm_epilogue_values values = gmm_epilogue_values_of(step, &args->p, t->g, t->row + t->m0);
    const int lane = (int)threadIdx.x & 31, w = (int)threadIdx.x >> 5 & 3;
    float cols0[GMM__CFG(wgmma_m)][4], cols8[GMM__CFG(wgmma_m)][4];
    float rows[GMM__CFG(m16) / 2 + 1]; /* one per lane */
    int j, u, x;
#pragma unroll
    for (x = 0; x < (GMM__CFG(m16) + 1) / 2; x++)
        rows[x] = values.rows && 32 * x + lane < t->rows ? values.rows[32 * x + lane] : 1.0f;
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++) {
        const int block = t->n0 + col0 + 64 * j, bytes = values.cols_dtype == GMM_F32 ? 4 : 2;
        const int c = (GMM__GLU ? gmm_sm90_glu_column(args->glu.block, block) : block) + gmm_wgmma_acc_m(w, lane, 0);
        cols0[j][0] = cols8[j][0] = 1.0f;
        if (!gmm_epilogue_reads_cols(step)) continue;
        gmm_read4(values.cols_dtype, values.cols + (int64_t)c * bytes, c < args->p.n, 0, cols0[j]);
        gmm_read4(values.cols_dtype, values.cols + (int64_t)(c + 8) * bytes, c + 8 < args->p.n, 0, cols8[j]);
    }
#pragma unroll
    for (u = 0; u < 8 * GMM__CFG(m16); u += 4) {
        const float row0 = __shfl_sync(0xFFFFFFFFu, rows[u / 16], gmm_wgmma_acc_n(lane, u % 16));
        const float row1 = __shfl_sync(0xFFFFFFFFu, rows[u / 16], gmm_wgmma_acc_n(lane, u % 16) + 1);
#pragma unroll
        for (j = 0; j < GMM__CFG(wgmma_m); j++) {
            acc[j][u] = gmm_epilogue_apply(step, acc[j][u], row0, cols0[j][0]);
            acc[j][u + 1] = gmm_epilogue_apply(step, acc[j][u + 1], row1, cols0[j][0]);
            acc[j][u + 2] = gmm_epilogue_apply(step, acc[j][u + 2], row0, cols8[j][0]);
            acc[j][u + 3] = gmm_epilogue_apply(step, acc[j][u + 3], row1, cols8[j][0]);
        }
    }
}

/* Stores a tile of wgrad's 16-bit D by TMA: slots hold its boxes. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_boxes_16_)(const gmm_sm90_output *out, uint32_t *part,
                                                     const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5, row_blocks = out->tile->row_blocks;
    const uint32_t st_at = gmm_wgmma_stmatrix_at(out->slots_at, 128, w, lane);
    int u, j;
#pragma unroll
    for (u = 0; u < GMM__CFG(m16); u++) {
        if (u % 4 == 0) { /* rows past the end of D stay in the slot */
            if (u >= row_blocks) break;
            gmm_sm90_acquire_slot(out->bars, *part);
        }
#pragma unroll
        for (j = 0; j < GMM__CFG(wgmma_m); j++) {
            const float *const f = &acc[j][8 * u];
            gmm_stmatrix_x4_trans(st_at + *part % GMM_SM90_STORE_SLOTS * GMM__CFG(slot_bytes) + j * 8192 + u % 4 * 2048,
                                  gmm_pack2(GMM__DTYPE, f[0], f[1]), gmm_pack2(GMM__DTYPE, f[2], f[3]),
                                  gmm_pack2(GMM__DTYPE, f[4], f[5]), gmm_pack2(GMM__DTYPE, f[6], f[7]));
        }
        if (u % 4 == 3) gmm_sm90_commit_slot(out->bars, (*part)++);
    }
}

/* Stores a tile of wgrad's fp32 D by TMA: slots hold its boxes, and before that the old D if beta is not 0. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_boxes_f32_)(const gmm_sm90_output *out, uint32_t *part,
                                                      float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5, row_blocks = out->tile->row_blocks;
    const float beta = out->beta;
    /* address of the element of column lane / 4 and row 2 (lane % 4); the swizzle makes steps of 8 columns and of 1
       row an XOR of this address */
    const uint32_t to = out->slots_at + w / 2 * 8192 + lane % 4 * 256 + lane / 4 % 4 * 4 +
                        (((w % 2 * 4 + lane / 16) ^ (lane % 4 * 2)) << 4);
    int u, j, e;
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++) {
        if (out->col0 + 64 * j >= out->tile->cols) break;
#pragma unroll
        for (u = 0; u < 2 * GMM__CFG(m16); u++) {
            const uint32_t slot_offset = *part % GMM_SM90_STORE_SLOTS * GMM__CFG(slot_bytes) + u % 8 * 1024;
            float old[4];
            if (u % 8 == 0) {
                if (u >= 2 * row_blocks) break;
                gmm_sm90_acquire_slot(out->bars, *part);
            }
            if (beta != 0.0f) {
#pragma unroll
                for (e = 0; e < 4; e++) old[e] = gmm_ld_shared_f32((to ^ (e / 2 * 32 + e % 2 * 144)) + slot_offset);
#pragma unroll
                for (e = 0; e < 4; e++) acc[j][4 * u + e] = __fmaf_rn(beta, old[e], acc[j][4 * u + e]);
            }
#pragma unroll
            for (e = 0; e < 4; e++)
                gmm_st_shared_f32((to ^ (e / 2 * 32 + e % 2 * 144)) + slot_offset, acc[j][4 * u + e]);
            if (u % 8 == 7) gmm_sm90_commit_slot(out->bars, (*part)++);
        }
    }
}

/* Stores a tile of 16-bit D by the threads: slots hold [row][column]. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_rows_16_)(const gmm_sm90_output *out, uint32_t *part,
                                                    const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const gmm_sm90_tile *const t = out->tile;
    /* computed here, so that the mainloop has their registers */
    const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5;
    const int row_blocks = t->row_blocks, row_bytes = 128 * GMM__CFG(wgmma_m);
    const int chunk = tid % (8 * GMM__CFG(wgmma_m)), slot_row = tid / (8 * GMM__CFG(wgmma_m));
    const int cols = t->cols - out->col0, cols_left = cols - 8 * chunk;
    const int vectorized = gmm_sm90_d_aligned(out) && (cols >= 64 * GMM__CFG(wgmma_m) || cols % 8 == 0);
    const int rows_left = cols_left > 0 ? t->rows - slot_row : 0;
    const uint32_t st_at = gmm_wgmma_stmatrix_at((uint32_t)__cvta_generic_to_shared(out->slots), row_bytes, w, lane);
    const char *const ld_at = out->slots + slot_row * row_bytes + ((chunk ^ (slot_row & 7)) << 4);
    const int64_t pitch = out->pitch;
    char *to = out->d + slot_row * pitch + (t->n0 + out->col0 + 8 * chunk) * 2;
    int u, x, j, e;
#pragma unroll
    for (u = 0; u < GMM__CFG(m16); u += GMM__CFG(store_blocks) / GMM__CFG(wgmma_m)) {
        const int slot = (*part & 1) * GMM__CFG(slot_bytes);
        uint4 v[GMM__CFG(store_blocks)];
        if (u >= row_blocks) break;
        (*part)++;
#pragma unroll
        for (x = 0; x < GMM__CFG(store_blocks) / GMM__CFG(wgmma_m); x++)
#pragma unroll
            for (j = 0; j < GMM__CFG(wgmma_m); j++)
                if (u + x < GMM__CFG(m16)) {
                    const float *const f = &acc[j][8 * (u + x)];
                    gmm_stmatrix_x4_trans(st_at + slot + x * 16 * row_bytes + 128 * j,
                                          gmm_pack2(GMM__DTYPE, f[0], f[1]), gmm_pack2(GMM__DTYPE, f[2], f[3]),
                                          gmm_pack2(GMM__DTYPE, f[4], f[5]), gmm_pack2(GMM__DTYPE, f[6], f[7]));
                }
        gmm_consumer_sync(out->wg);
        if (vectorized) {
#pragma unroll
            for (x = 0; x < GMM__CFG(store_blocks); x++) v[x] = *(const uint4 *)(ld_at + slot + x * 2048);
#pragma unroll
            for (x = 0; x < GMM__CFG(store_blocks); x++, to += 16 / GMM__CFG(wgmma_m) * pitch)
                if (16 * u + 16 / GMM__CFG(wgmma_m) * x < rows_left) *(uint4 *)to = v[x];
        } else {
#pragma unroll 1
            for (x = 0; x < GMM__CFG(store_blocks); x++, to += 16 / GMM__CFG(wgmma_m) * pitch)
#pragma unroll 1
                for (e = 0; e < 8 && e < cols_left && 16 * u + 16 / GMM__CFG(wgmma_m) * x < rows_left; e++)
                    ((uint16_t *)to)[e] = ((const uint16_t *)(ld_at + slot + x * 2048))[e];
        }
    }
}

/* Writes part number `part` of the warp group's fp32 sums to a slot. Parts of GMM__ROWS_PER_STORE rows and 64 columns
   are numbered along the rows, then along the columns. `to`: the thread's address in the slot for its first row and
   column 0. */
GMM__DEVICE void GMM__PART(gmm_sm90_write_sums_)(int part, char *to, int lane, int w,
                                                 const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int column4 = w * 4 + lane / 16; /* the thread's columns in units of 4 */
    int p, x, e;
#pragma unroll
    for (p = 0; p < GMM__CFG(wgmma_m) * GMM__PARTS_PER_COLUMN; p++) {
        const int j = p / GMM__PARTS_PER_COLUMN, u = p % GMM__PARTS_PER_COLUMN * (GMM__ROWS_PER_STORE / 16);
        if (p != part) continue; /* accumulators are indexed by constants alone */
#pragma unroll
        for (x = 0; x < GMM__ROWS_PER_STORE / 16; x++)
            if (u + x < GMM__CFG(m16)) {
#pragma unroll
                for (e = 0; e < 8; e++)
                    *(float *)(to + x * 4096 + e / 4 * 2048 + e % 2 * 256 +
                               (((column4 + e / 2 % 2 * 2) ^ (lane % 4 * 2)) << 4)) = acc[j][8 * (u + x) + e];
            }
    }
}

/* Stores a tile of D of any dtype and alignment by the threads: slots hold fp32 sums. Two slots alternate, since the
   last one may still be read; wgrad halves one slot. The loop over parts is not unrolled, since ptxas takes two to
   seven times as long for a kernel where it is. For packed weights it is, by three: otherwise, or by six or all parts,
   their mainloops are 1 to 7% slower. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_any_)(const gmm_sm90_output *out, uint32_t *part,
                                                const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    enum { PARTS = GMM__CFG(wgmma_m) * GMM__PARTS_PER_COLUMN, UNROLL = GMM__CFG(b_format) ? 3 : 1 };
    const gmm_sm90_tile *const t = out->tile;
    const int size = out->size;
    const float beta = out->beta;
    const int64_t pitch = out->pitch;
    uint32_t next_part = *part;
    int p, x, e;
    if (GMM__DEFERRED) { /* waits for deferred stores that still read the slots */
        if ((threadIdx.x & 127) == 0) GMM__BULK_WAIT_GROUP_READ(0);
        gmm_consumer_sync(out->wg);
    }
    if (GMM__K_GROUPED) gmm_sm90_acquire_slot(out->bars, *part);
#pragma unroll UNROLL
    for (p = 0; p < PARTS; p++) {
        /* read anew for each part: values that lived on would take registers */
        const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5, rows_left = t->rows - tid / 16;
        const int c0 = out->col0 + p / GMM__PARTS_PER_COLUMN * 64;
        const int row = p % GMM__PARTS_PER_COLUMN * GMM__ROWS_PER_STORE; /* the part's first */
        const int vectorized = gmm_sm90_d_aligned(out) && t->cols - c0 >= 64;
        const int slot = (next_part & 1) * (GMM__CFG(slot_bytes) >> GMM__K_GROUPED);
        const char *const ld_at = out->slots + slot + tid / 16 * 256 + (((tid % 16) ^ (tid / 32 % 4 * 2)) << 4);
        char *to = out->d + (row + tid / 16) * pitch + (t->n0 + c0 + 4 * (tid % 16)) * size;
        uint4 old[GMM__ROWS_PER_STORE / 8]; /* old D: all loads are issued first */
        if (row >= 16 * t->row_blocks || c0 >= t->cols) continue;
        next_part++;
#pragma unroll
        for (x = 0; x < GMM__ROWS_PER_STORE / 8; x++) {
            old[x] = make_uint4(0, 0, 0, 0);
            if (vectorized && beta != 0.0f && !GMM__K_GROUPED && row + 8 * x < rows_left)
                old[x] = gmm_sm90_d_load4(size, to + 8 * x * pitch);
        }
        GMM__PART(gmm_sm90_write_sums_)(p, out->slots + slot + lane % 4 * 512 + lane / 4 % 4 * 4, lane, w, acc);
        gmm_consumer_sync(out->wg);
        if (vectorized) {
#pragma unroll
            for (x = 0; x < GMM__ROWS_PER_STORE / 8; x++, to += 8 * pitch) {
                const float4 f = *(const float4 *)(ld_at + x * 2048);
                float v[4];
                v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
                if (GMM__K_GROUPED && beta != 0.0f && row + 8 * x < rows_left) old[x] = gmm_sm90_d_load4(size, to);
                if (beta != 0.0f)
#pragma unroll
                    for (e = 0; e < 4; e++)
                        v[e] = __fmaf_rn(beta, gmm_sm90_d_value(out->p->d.dtype, &old[x], e), v[e]);
                if (row + 8 * x < rows_left) gmm_write4(out->p->d.dtype, to, 4, 1, v);
            }
        } else {
#pragma unroll 1
            for (x = 0; x < GMM__ROWS_PER_STORE / 8; x++, to += 8 * pitch)
#pragma unroll 1
                for (e = 0; e < 4 && e < t->cols - c0 - 4 * (tid % 16) && row + 8 * x < rows_left; e++) {
                    float v[4], stored[4];
                    v[0] = ((const float *)(ld_at + x * 2048))[e];
                    gmm_read4(out->p->d.dtype, to + e * size, beta != 0.0f, 0, stored);
                    if (beta != 0.0f) v[0] = __fmaf_rn(beta, stored[0], v[0]);
                    gmm_write4(out->p->d.dtype, to + e * size, 1, 0, v);
                }
        }
    }
    if (GMM__K_GROUPED)
        for (next_part = gmm_sm90_d_parts(t, size); next_part > 0; next_part--, (*part)++) {
            gmm_sm90_acquire_slot(out->bars, *part);
            gmm_sm90_commit_slot(out->bars, *part);
        }
    else *part = next_part;
}

#if !GMM__GLU && !GMM__DGLU
/* Stores a tile of D as D admits. With a deferred store, D becomes `deferred`, and store->pending says how much of it
   the next tile's mainloop has to store. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_d_)(const gmm_sm90_output *out, gmm_sm90_store_state *store,
                                              uint32_t deferred[GMM__DEFERRED_WORDS],
                                              float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const gmm_sm90_tile *const t = out->tile;
    const int size = out->size, by_tma = GMM__K_GROUPED && gmm_sm90_d_by_tma(out->p, t->g, out->beta);
    int u;
    if (by_tma && size == 2) GMM__PART(gmm_sm90_store_boxes_16_)(out, &store->part, acc);
    else if (GMM__DEFERRED && size == 2 && out->beta == 0.0f) {
#pragma unroll
        for (u = 0; u < GMM__DEFERRED_WORDS; u++)
            deferred[u] = gmm_pack2(GMM__DTYPE, acc[0][2 * u], acc[0][2 * u + 1]);
        store->pending = t->row_blocks;
    } else if (!GMM__K_GROUPED && !GMM__DEFERRED && size == 2 && out->beta == 0.0f)
        GMM__PART(gmm_sm90_store_rows_16_)(out, &store->part, acc);
    else if (by_tma) GMM__PART(gmm_sm90_store_boxes_f32_)(out, &store->part, acc);
    else GMM__PART(gmm_sm90_store_any_)(out, &store->part, acc);
}
#endif

/* The epilogue of a tile: alpha, the steps, and the store. `first`: of the CTA. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_tile_)(const GMM__ARGS *args, gmm_sm90_output *out, int first,
                                                 gmm_sm90_store_state *store, uint32_t deferred[GMM__DEFERRED_WORDS],
                                                 float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const gmm_sm90_tile *const t = out->tile;
    GMM__PART(gmm_sm90_scale_accumulators_)(args, t, acc);
#define GMM__X(name, rows, cols) \
    if (!GMM__K_GROUPED && gmm_epilogue_present(GMM_EPILOGUE_##name, &args->p)) \
        GMM__PART(gmm_sm90_apply_step_)(GMM_EPILOGUE_##name, args, t, out->col0, acc);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    out->beta = gmm_gemm_beta(&args->p, t->g);
    out->p = &args->p;
    out->d = gmm_kmat_data(&args->p.d, t->g) + (t->m0 + (GMM__K_GROUPED ? 0 : (int64_t)t->row)) * out->pitch;
    if (GMM__K_GROUPED && !first) gmm_order_wait(out->wg); /* slots are used in the order of tiles */
#if GMM__GLU
    (void)deferred;
    GMM__PART(gmm_sm90_store_glu_)(args, out, &store->part, acc);
#elif GMM__DGLU
    (void)deferred;
    GMM__PART(gmm_sm90_store_dglu_)(args, out, &store->part, acc);
#else
    GMM__PART(gmm_sm90_store_d_)(out, store, deferred, acc);
#endif
    if (GMM__K_GROUPED) gmm_order_arrive(out->wg ^ 1);
}
#endif
