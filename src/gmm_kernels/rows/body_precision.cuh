/* ======================================================================================== Bodies per precision === */

#elif GMM__BODY == GMM__BODY_PRECISION
#define GMM__TAG GMM__COLUMN(1, GMM__ROW)
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)
#define GMM__STATIC_DTYPE ((gmm_dtype)GMM__NAME(gmm__static_dtype))
/* Whether lanes have the column layout of fp32 rows; `dynamic`: the answer where dtypes are read at run time. */
#define GMM__WIDE(dynamic) (GMM__STATIC_DTYPE == GMM_NONE ? (dynamic) : GMM__STATIC_DTYPE == GMM_F32)

/* Loads the gate and linear inputs of a lane's columns, and dy if it is given. */
GMM__DEVICE gmm__act_operands GMM__NAME(gmm__act_load_operands)(const gmm__act_args *a, int64_t row,
                                                                const gmm__lane_cols *cols) {
    gmm__act_operands in = GMM_ZERO;
    gmm__lane_cols x_cols = *cols;
    int32_t i;
    if (a->dy.data) in.dy = gmm__load8(GMM__STATIC_DTYPE, &a->dy, row, cols);
    if (a->layout == GMM__GLU_SPLIT) {
        x_cols.col[0] = gmm__act_gate_column(cols->col[0], a->interleave);
        x_cols.col[1] = gmm__act_gate_column(cols->col[1], a->interleave);
        in.a = gmm__load8(GMM__STATIC_DTYPE, &a->x, row, &x_cols);
        if (!a->gated) return in;
        x_cols.col[0] += gmm__act_linear_offset(a);
        x_cols.col[1] += gmm__act_linear_offset(a);
        in.b = gmm__load8(GMM__STATIC_DTYPE, &a->x, row, &x_cols);
    } else if (a->layout == GMM__GLU_PAIRS) {
        x_cols = gmm__lane_cols_at(2 * cols->col[0], 2 * cols->col[0] + 4, 2 * cols->col[0] + 2 * cols->n[0]);
        in.a = gmm__load8(GMM__STATIC_DTYPE, &a->x, row, &x_cols);
        x_cols = gmm__lane_cols_at(2 * cols->col[1], 2 * cols->col[1] + 4, 2 * cols->col[1] + 2 * cols->n[1]);
        in.b = gmm__load8(GMM__STATIC_DTYPE, &a->x, row, &x_cols);
    } else if (GMM__STATIC_DTYPE == GMM_NONE) {
#pragma unroll
        for (i = 0; i < 8; i++) {
            const int32_t col = gmm__act_gate_column(cols->col[i / 4] + i % 4, a->interleave);
            if (i % 4 < cols->n[i / 4]) gmm__load_element(&a->x, row, col, i, &in.a);
            if (i % 4 < cols->n[i / 4]) gmm__load_element(&a->x, row, col + gmm__act_linear_offset(a), i, &in.b);
        }
    }
    return in;
}

GMM__DEVICE void GMM__NAME(gmm__act_decode)(const gmm__act_args *a, gmm__act_operands *in, float va[8], float vb[8]) {
    if (a->layout == GMM__GLU_PAIRS)
        gmm__deinterleave(GMM__STATIC_DTYPE != GMM_NONE ? GMM__STATIC_DTYPE : a->x.dtype, &in->a, &in->b);
    gmm__decode8(GMM__STATIC_DTYPE, &a->x, &in->a, va);
    gmm__decode8(GMM__STATIC_DTYPE, &a->x, &in->b, vb);
}

/* Stores the gradients of the gate and linear inputs. */
GMM__DEVICE void GMM__NAME(gmm__act_gradients)(const gmm__act_args *a, int64_t row, const gmm__lane_cols *cols,
                                               const float va[8], const float vb[8]) {
    gmm__lane_cols dx_cols = *cols;
    int32_t i, j;
    if (a->layout == GMM__GLU_SPLIT) {
        dx_cols.col[0] = gmm__act_gate_column(cols->col[0], a->interleave);
        dx_cols.col[1] = gmm__act_gate_column(cols->col[1], a->interleave);
        gmm__store8(GMM__STATIC_DTYPE, &a->dx, row, &dx_cols, va);
        if (!a->gated) return;
        dx_cols.col[0] += gmm__act_linear_offset(a);
        dx_cols.col[1] += gmm__act_linear_offset(a);
        gmm__store8(GMM__STATIC_DTYPE, &a->dx, row, &dx_cols, vb);
    } else if (a->layout == GMM__GLU_PAIRS) {
#pragma unroll
        for (j = 0; j < 2; j++) {
            float u[8];
#pragma unroll
            for (i = 0; i < 8; i++) u[i] = i & 1 ? vb[4 * j + i / 2] : va[4 * j + i / 2];
            dx_cols = gmm__lane_cols_at(2 * cols->col[j], 2 * cols->col[j] + 4, 2 * cols->col[j] + 2 * cols->n[j]);
            if (cols->n[j] > 0) gmm__store8(GMM__STATIC_DTYPE, &a->dx, row, &dx_cols, u);
        }
    } else if (GMM__STATIC_DTYPE == GMM_NONE) {
#pragma unroll
        for (i = 0; i < 8; i++)
            if (i % 4 < cols->n[i / 4]) {
                const int32_t col = gmm__act_gate_column(cols->col[i / 4] + i % 4, a->interleave);
                gmm__store_f32(&a->dx, row, col, va[i]);
                gmm__store_f32(&a->dx, row, col + gmm__act_linear_offset(a), vb[i]);
            }
    }
}

/* Spans of GMM__ELEM_SPAN columns that a warp loads together, so that enough loads are in flight and loop overhead
   is shared. */
#define GMM__SPANS (GMM__STATIC_DTYPE == GMM_BF16 || GMM__STATIC_DTYPE == GMM_F16 ? 2 : 1)

/* y = p f(x): the forward activation of each row, multiplied by the row's probability p; rows behind the used ones
   become zeros if the tail is zeroed. A task is one span of a row. Grid-stride loop: a warp processes GMM__SPANS
   consecutive tasks at a time. takes_amax: whether a.amax is wanted, a constant of each kernel. */
GMM__DEVICE void GMM__NAME(gmm__act_fwd_rows)(const gmm__act_args *a, int takes_amax) {
    gmm_pdl_wait();
    const uint32_t valid_rows = (uint32_t)*a->valid_rows, rows = a->tail_zero ? (uint32_t)a->rows : valid_rows;
    const gmm_dtype dtype = GMM__STATIC_DTYPE != GMM_NONE ? GMM__STATIC_DTYPE : a->y.dtype;
    gmm__grid_loop loop = gmm__grid_loop_begin((a->ffn - 1) / GMM__ELEM_SPAN + 1, GMM__SPANS);
    gmm__group_amax amax = { 0, 0 };
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        gmm__act_operands in[2];
        gmm__lane_cols cols[2];
        gmm__grid_loop task[2];
        float p[2];
        uint32_t maximum[2]; /* of lanes that have columns */
        int32_t i, j;
        task[0] = loop;
        task[1] = gmm__grid_loop_successor(loop);
#pragma unroll
        for (j = 0; j < GMM__SPANS; j++) {
            cols[j] = gmm__lane_cols_of(GMM__WIDE(a->wide), (int32_t)task[j].part, task[j].row < rows ? a->ffn : 0);
            p[j] = 1.0f;
            if (cols[j].n[0] > 0 && task[j].row < valid_rows) {
                if (a->prob) p[j] = a->prob[task[j].row];
                in[j] = GMM__NAME(gmm__act_load_operands)(a, task[j].row, &cols[j]);
            }
        }
#pragma unroll
        for (j = 0; j < GMM__SPANS; j++)
            if (cols[j].n[0] > 0) {
                float va[8], vb[8], f[8], da[8], db[8];
                if (task[j].row < valid_rows) {
                    GMM__NAME(gmm__act_decode)(a, &in[j], va, vb);
                    gmm__act_x8(a->kind, 0, a->coef, va, vb, f, da, db);
                }
#pragma unroll
                for (i = 0; i < 8; i++) f[i] = task[j].row < valid_rows ? p[j] * f[i] : 0.0f;
                if (takes_amax) maximum[j] = gmm__act_max8(0, &cols[j], f);
                gmm__store8(GMM__STATIC_DTYPE, &a->y, task[j].row, &cols[j], f);
            }
        if (!takes_amax) continue;
#pragma unroll
        for (j = 0; j < GMM__SPANS; j++)
            if (task[j].row < valid_rows)
                gmm__group_amax_add(a, dtype, &amax, task[j].row, cols[j].n[0] > 0 ? maximum[j] : 0u);
    }
    if (takes_amax) gmm__group_amax_store(a, dtype, &amax);
}
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_act_fwd)(const __grid_constant__ gmm__act_args a) {
    GMM__NAME(gmm__act_fwd_rows)(&a, 0);
}
#ifndef GMM_NO_QUANT /* casts alone want an amax */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_act_fwd_amax)(const __grid_constant__ gmm__act_args a) {
    GMM__NAME(gmm__act_fwd_rows)(&a, 1);
}
#endif
#undef GMM__SPANS

/* dx = p dy df/dx, y = p f(x), dprob = dy . f(x). With dprob, one warp computes a row or, where a row has at least
   as many spans as a CTA has warps, one CTA; the order of additions depends on ffn and the dtypes alone. Without
   dprob each span is a task of its own. The sum of a row for dprob: a lane adds up its columns of a span, then a
   quarter of a warp its lanes, then its spans in their order; then quarters and warps are added. gmm_act_dprob
   (dprob.cuh) adds in the same order. */
GMM__DEVICE void GMM__NAME(gmm__act_bwd_rows)(const gmm__act_args *a, int takes_amax) {
    gmm_pdl_wait();
    const uint32_t valid_rows = (uint32_t)*a->valid_rows, rows = a->tail_zero ? (uint32_t)a->rows : valid_rows;
    const uint32_t parts = (uint32_t)(a->ffn - 1) / GMM__ELEM_SPAN + 1;
    const uint32_t row_warps = a->dprob ? (uint32_t)gmm__act_warps_per_row(a->ffn) : parts; /* warps that share a row */
    const gmm_dtype dtype = GMM__STATIC_DTYPE != GMM_NONE ? GMM__STATIC_DTYPE : a->dx.dtype;
    __shared__ float sums[GMM__ELEM_WARPS];
    gmm__grid_loop loop = gmm__grid_loop_begin(row_warps, 1);
    gmm__group_amax amax = { 0, 0 };
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        const float p = a->prob && loop.row < valid_rows ? a->prob[loop.row] : 1.0f;
        float sum = 0.0f;
        uint32_t part, maximum = 0;
        for (part = loop.part; part < parts; part += row_warps) {
            const gmm__lane_cols cols = gmm__lane_cols_of(GMM__WIDE(a->wide), (int32_t)part, a->ffn);
            float va[8], vb[8], f[8], da[8], db[8], g[8], span_sum = 0.0f;
            int32_t i;
            if (loop.row < valid_rows && cols.n[0] > 0) {
                gmm__act_operands in = GMM__NAME(gmm__act_load_operands)(a, loop.row, &cols);
                GMM__NAME(gmm__act_decode)(a, &in, va, vb);
                gmm__act_x8(a->kind, 0, a->coef, va, vb, f, da, db);
                gmm__decode8(GMM__STATIC_DTYPE, &a->dy, &in.dy, g);
#pragma unroll
                for (i = 0; i < 8; i++) {
                    if (i % 4 < cols.n[i / 4]) span_sum = fmaf(g[i], f[i], span_sum);
                    da[i] *= p * g[i];
                    db[i] *= p * g[i];
                    f[i] *= p;
                }
            } else {
#pragma unroll
                for (i = 0; i < 8; i++) f[i] = da[i] = db[i] = 0.0f;
            }
            if (a->dprob) sum = __fadd_rn(sum, gmm__quarter_warp_sum(span_sum));
            if (cols.n[0] <= 0) continue;
            if (takes_amax) maximum = gmm__act_max8(gmm__act_max8(maximum, &cols, da), &cols, db);
            if (a->dx.data) GMM__NAME(gmm__act_gradients)(a, loop.row, &cols, da, db);
            if (a->y.data) gmm__store8(GMM__STATIC_DTYPE, &a->y, loop.row, &cols, f);
        }
        if (takes_amax && loop.row < valid_rows) gmm__group_amax_add(a, dtype, &amax, loop.row, maximum);
        if (!a->dprob) continue;
        sum = gmm__sum_of_quarters(sum);
        if (row_warps > 1) { /* sums of the CTA's warps */
            int32_t i;
            if (gmm__lane() == 0) sums[gmm__warp()] = sum;
            __syncthreads();
            for (i = 0, sum = 0.0f; i < GMM__ELEM_WARPS; i++) sum += sums[i];
            __syncthreads();
        }
        if (loop.part == 0 && gmm__lane() == 0) a->dprob[loop.row] = sum;
    }
    if (takes_amax) gmm__group_amax_store(a, dtype, &amax);
}
#define GMM__BWD_PER_SM (GMM__STATIC_DTYPE == GMM_BF16 || GMM__STATIC_DTYPE == GMM_F16 ? 7 : 5)
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, GMM__BWD_PER_SM)
GMM__NAME(gmm_act_bwd)(const __grid_constant__ gmm__act_args a) {
    GMM__NAME(gmm__act_bwd_rows)(&a, 0);
}
#ifndef GMM_NO_QUANT /* casts alone want an amax */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, GMM__BWD_PER_SM)
GMM__NAME(gmm_act_bwd_amax)(const __grid_constant__ gmm__act_args a) {
    GMM__NAME(gmm__act_bwd_rows)(&a, 1);
}
#endif
#undef GMM__BWD_PER_SM

/* Rows of a token that a warp loads at once. */
#define GMM__BATCH (GMM__STATIC_DTYPE == GMM_BF16 || GMM__STATIC_DTYPE == GMM_F16 ? 4 : 2)

/* out[t] = sum over slots of (probs) rows[row], in the order of slots. A task is one span of a token. The row
   indices of a batch are loaded one batch ahead. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_unpermute_fwd)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin((a.hidden - 1) / GMM__ELEM_SPAN + 1, 1);
    float sum[8], p[4], next_p[4];
    int32_t row[4], next_row[4], i = 0, j, k;
#pragma unroll
    for (k = 0; k < 8; k++) sum[k] = 0.0f;
#pragma unroll
    for (j = 0; j < GMM__BATCH; j++)
        next_row[j] = loop.row < a.tokens ? gmm__slot_row(&a, loop.row, j, &next_p[j]) : -1;
    while (loop.row < a.tokens) {
        const gmm__lane_cols cols = gmm__lane_cols_of(GMM__WIDE(a.wide), (int32_t)loop.part, (int32_t)a.hidden);
        const uint32_t token = loop.row;
        gmm__raw8 r[4];
#pragma unroll
        for (j = 0; j < GMM__BATCH; j++) {
            row[j] = next_row[j];
            p[j] = next_p[j];
            if (row[j] >= 0 && cols.n[0] > 0) r[j] = gmm__load8(GMM__STATIC_DTYPE, &a.src, row[j], &cols);
        }
        i += GMM__BATCH;
        if (i >= a.topk) {
            i = 0;
            gmm__grid_loop_next(&loop);
        }
#pragma unroll
        for (j = 0; j < GMM__BATCH; j++)
            next_row[j] = loop.row < a.tokens ? gmm__slot_row(&a, loop.row, i + j, &next_p[j]) : -1;
#pragma unroll
        for (j = 0; j < GMM__BATCH; j++)
            if (row[j] >= 0 && cols.n[0] > 0) {
                float v[8];
                gmm__decode8(GMM__STATIC_DTYPE, &a.src, &r[j], v);
#pragma unroll
                for (k = 0; k < 8; k++) sum[k] = fmaf(p[j], v[k], sum[k]);
            }
        if (i == 0) {
            if (cols.n[0] > 0) gmm__store8(GMM__STATIC_DTYPE, &a.dst, token, &cols, sum);
#pragma unroll
            for (k = 0; k < 8; k++) sum[k] = 0.0f;
        }
    }
}
#undef GMM__BATCH

/* drows[r] = (probs) dout[token of r]; rows of padding become zeros. A task is two spans of a row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_unpermute_bwd)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault), slots = a.tokens * a.topk;
    const int64_t rows = a.tail_zero ? a.capacity : valid_rows;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.hidden - 1) / (2 * GMM__ELEM_SPAN) + 1, 1);
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        const int32_t slot = loop.row < valid_rows ? gmm__map_entry(a.slot_of, loop.row, slots, a.fault) : -1;
        const float p = slot >= 0 && a.probs ? a.probs[slot] : 1.0f;
        gmm__raw8 r[2];
        gmm__lane_cols cols[2];
        int32_t j, k;
#pragma unroll
        for (j = 0; j < 2; j++) {
            cols[j] = gmm__lane_cols_of(GMM__WIDE(a.wide), (int32_t)(2 * loop.part) + j, (int32_t)a.hidden);
            if (slot >= 0 && cols[j].n[0] > 0)
                r[j] = gmm__load8(GMM__STATIC_DTYPE, &a.src, (uint32_t)slot / (uint32_t)a.topk, &cols[j]);
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (cols[j].n[0] > 0) {
                float v[8];
                if (slot >= 0) gmm__decode8(GMM__STATIC_DTYPE, &a.src, &r[j], v);
#pragma unroll
                for (k = 0; k < 8; k++) v[k] = slot >= 0 ? p * v[k] : 0.0f;
                gmm__store8(GMM__STATIC_DTYPE, &a.dst, loop.row, &cols[j], v);
            }
    }
}

/* dprobs[slot] = dout[token] . rows[row]. One warp per slot. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 6)
GMM__NAME(gmm_unpermute_dots)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin(a.topk, 1);
    for (; loop.row < a.tokens; gmm__grid_loop_next(&loop)) {
        const int64_t slot = (int64_t)loop.row * a.topk + loop.part;
        const int32_t row = gmm__map_entry(a.row_of, slot, a.capacity, a.fault);
        float sum = 0.0f;
        int32_t part;
        for (part = 0; row >= 0; part += 2) {
            gmm__raw8 r[2], s[2];
            gmm__lane_cols cols[2];
            int32_t j, k;
#pragma unroll
            for (j = 0; j < 2; j++) {
                cols[j] = gmm__lane_cols_of(GMM__WIDE(a.wide), part + j, (int32_t)a.hidden);
                if (cols[j].n[0] > 0) r[j] = gmm__load8(GMM__STATIC_DTYPE, &a.src, loop.row, &cols[j]);
                if (cols[j].n[0] > 0) s[j] = gmm__load8(GMM__STATIC_DTYPE, &a.dst, row, &cols[j]);
            }
            if (cols[0].n[0] <= 0) break;
#pragma unroll
            for (j = 0; j < 2; j++)
                if (cols[j].n[0] > 0) {
                    float u[8], v[8];
                    gmm__decode8(GMM__STATIC_DTYPE, &a.src, &r[j], u);
                    gmm__decode8(GMM__STATIC_DTYPE, &a.dst, &s[j], v);
#pragma unroll
                    for (k = 0; k < 8; k++) sum = fmaf(u[k], v[k], sum);
                }
        }
        sum = gmm__warp_sum(sum);
        if (gmm__lane() == 0) a.dprobs[slot] = sum;
    }
}

#undef GMM__WIDE
#undef GMM__STATIC_DTYPE
#undef GMM__NAME
#undef GMM__TAG
#undef GMM__ROW

