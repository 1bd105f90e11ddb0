/* ======================================================================================== Bodies per precision === */

#elif GMM__BODY == 4
#ifndef GMM__TAG
#error "gmm: this body needs GMM__TAG"
#endif
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)
#define GMM__FIXED ((gmm_dtype)GMM__NAME(gmm__fixed))

#define GMM__WIDE(at_run_time) (GMM__FIXED == GMM_NONE ? (at_run_time) : GMM__FIXED == GMM_F32)

/* Reads the gate and the linear part of the quads q, and dy if there is one. */
GMM__DEVICE gmm__act_in GMM__NAME(gmm__act_fetch)(const gmm__act_args *a, int64_t row, const gmm__lane_cols *q) {
    gmm__act_in in = GMM_ZERO;
    gmm__lane_cols at = *q;
    int32_t i;
    if (a->dy.data) in.dy = gmm__load8(GMM__FIXED, &a->dy, row, q);
    if (a->layout == GMM__GLU_SPLIT) {
        at.col[0] = gmm__act_gate_column(q->col[0], a->interleave);
        at.col[1] = gmm__act_gate_column(q->col[1], a->interleave);
        in.a = gmm__load8(GMM__FIXED, &a->x, row, &at);
        if (!a->gated) return in;
        at.col[0] += gmm__act_linear_offset(a);
        at.col[1] += gmm__act_linear_offset(a);
        in.b = gmm__load8(GMM__FIXED, &a->x, row, &at);
    } else if (a->layout == GMM__GLU_PAIRS) {
        at = gmm__lane_cols_at(2 * q->col[0], 2 * q->col[0] + 4, 2 * q->col[0] + 2 * q->n[0]);
        in.a = gmm__load8(GMM__FIXED, &a->x, row, &at);
        at = gmm__lane_cols_at(2 * q->col[1], 2 * q->col[1] + 4, 2 * q->col[1] + 2 * q->n[1]);
        in.b = gmm__load8(GMM__FIXED, &a->x, row, &at);
    } else if (GMM__FIXED == GMM_NONE) {
#pragma unroll
        for (i = 0; i < 8; i++) {
            const int32_t col = gmm__act_gate_column(q->col[i / 4] + i % 4, a->interleave);
            if (i % 4 < q->n[i / 4]) gmm__load_element(&a->x, row, col, i, &in.a);
            if (i % 4 < q->n[i / 4]) gmm__load_element(&a->x, row, col + gmm__act_linear_offset(a), i, &in.b);
        }
    }
    return in;
}

GMM__DEVICE void GMM__NAME(gmm__act_decode)(const gmm__act_args *a, gmm__act_in *in, float va[8], float vb[8]) {
    if (a->layout == GMM__GLU_PAIRS) gmm__deinterleave(GMM__FIXED != GMM_NONE ? GMM__FIXED : a->x.dtype, &in->a,
                                                       &in->b);
    gmm__decode8(GMM__FIXED, &a->x, &in->a, va);
    gmm__decode8(GMM__FIXED, &a->x, &in->b, vb);
}

/* Writes the gradients of both inputs. */
GMM__DEVICE void GMM__NAME(gmm__act_gradients)(const gmm__act_args *a, int64_t row, const gmm__lane_cols *q,
                                               const float va[8], const float vb[8]) {
    gmm__lane_cols at = *q;
    int32_t i, j;
    if (a->layout == GMM__GLU_SPLIT) {
        at.col[0] = gmm__act_gate_column(q->col[0], a->interleave);
        at.col[1] = gmm__act_gate_column(q->col[1], a->interleave);
        gmm__store8(GMM__FIXED, &a->dx, row, &at, va);
        if (!a->gated) return;
        at.col[0] += gmm__act_linear_offset(a);
        at.col[1] += gmm__act_linear_offset(a);
        gmm__store8(GMM__FIXED, &a->dx, row, &at, vb);
    } else if (a->layout == GMM__GLU_PAIRS) {
#pragma unroll
        for (j = 0; j < 2; j++) {
            float u[8];
#pragma unroll
            for (i = 0; i < 8; i++) u[i] = i & 1 ? vb[4 * j + i / 2] : va[4 * j + i / 2];
            at = gmm__lane_cols_at(2 * q->col[j], 2 * q->col[j] + 4, 2 * q->col[j] + 2 * q->n[j]);
            if (q->n[j] > 0) gmm__store8(GMM__FIXED, &a->dx, row, &at, u);
        }
    } else if (GMM__FIXED == GMM_NONE) {
#pragma unroll
        for (i = 0; i < 8; i++)
            if (i % 4 < q->n[i / 4]) {
                const int32_t col = gmm__act_gate_column(q->col[i / 4] + i % 4, a->interleave);
                gmm__put(&a->dx, row, col, va[i]);
                gmm__put(&a->dx, row, col + gmm__act_linear_offset(a), vb[i]);
            }
    }
}

/* Spans that a warp reads together: enough accesses under way, and the steps around them shared. */
#define GMM__SPANS (GMM__FIXED == GMM_BF16 || GMM__FIXED == GMM_F16 ? 2 : 1)

/* y = p f(x) */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_act_fwd)(const __grid_constant__ gmm__act_args a) {
    gmm_pdl_wait();
    const uint32_t live = (uint32_t)*a.live, rows = a.tail_zero ? (uint32_t)a.rows : live;
    gmm__grid_loop w = gmm__grid_loop_begin((a.ffn - 1) / GMM__ELEM_SPAN + 1, GMM__SPANS);
    for (; w.row < rows; gmm__grid_loop_next(&w)) {
        gmm__act_in in[2];
        gmm__lane_cols q[2];
        gmm__grid_loop at[2];
        float p[2];
        int32_t i, j;
        at[0] = w;
        at[1] = gmm__grid_loop_following(w);
#pragma unroll
        for (j = 0; j < GMM__SPANS; j++) {
            q[j] = gmm__lane_cols_of(GMM__WIDE(a.wide), (int32_t)at[j].part, at[j].row < rows ? a.ffn : 0);
            p[j] = 1.0f;
            if (q[j].n[0] > 0 && at[j].row < live) {
                if (a.prob) p[j] = a.prob[at[j].row];
                in[j] = GMM__NAME(gmm__act_fetch)(&a, at[j].row, &q[j]);
            }
        }
#pragma unroll
        for (j = 0; j < GMM__SPANS; j++)
            if (q[j].n[0] > 0) {
                float va[8], vb[8], f[8], da[8], db[8];
                if (at[j].row < live) {
                    GMM__NAME(gmm__act_decode)(&a, &in[j], va, vb);
                    gmm__act8(a.kind, a.coef, va, vb, f, da, db);
                }
#pragma unroll
                for (i = 0; i < 8; i++) f[i] = at[j].row < live ? p[j] * f[i] : 0.0f;
                gmm__store8(GMM__FIXED, &a.y, at[j].row, &q[j], f);
            }
    }
}
#undef GMM__SPANS

/* dx = p dy df/dx, y = p f(x), dprob = dy . f(x). With dprob a row is taken by one warp or, from as many spans on as a
   block has warps, by a block; its lanes add in an order that depends on ffn and the dtypes alone. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, GMM__FIXED == GMM_BF16 || GMM__FIXED == GMM_F16 ? 7 : 5)
GMM__NAME(gmm_act_bwd)(const __grid_constant__ gmm__act_args a) {
    gmm_pdl_wait();
    const uint32_t live = (uint32_t)*a.live, rows = a.tail_zero ? (uint32_t)a.rows : live;
    const uint32_t parts = (uint32_t)(a.ffn - 1) / GMM__ELEM_SPAN + 1;
    const uint32_t team = a.dprob ? (uint32_t)gmm__act_warps_per_row(a.ffn) : parts; /* warps of a row */
    __shared__ float sums[GMM__ELEM_WARPS];
    gmm__grid_loop w = gmm__grid_loop_begin(team, 1);
    for (; w.row < rows; gmm__grid_loop_next(&w)) {
        const float p = a.prob && w.row < live ? a.prob[w.row] : 1.0f;
        float sum = 0.0f;
        uint32_t part;
        for (part = w.part; part < parts; part += team) {
            const gmm__lane_cols q = gmm__lane_cols_of(GMM__WIDE(a.wide), (int32_t)part, a.ffn);
            float va[8], vb[8], f[8], da[8], db[8], g[8];
            int32_t i;
            if (q.n[0] <= 0) continue;
            if (w.row < live) {
                gmm__act_in in = GMM__NAME(gmm__act_fetch)(&a, w.row, &q);
                GMM__NAME(gmm__act_decode)(&a, &in, va, vb);
                gmm__act8(a.kind, a.coef, va, vb, f, da, db);
                gmm__decode8(GMM__FIXED, &a.dy, &in.dy, g);
#pragma unroll
                for (i = 0; i < 8; i++) {
                    if (i % 4 < q.n[i / 4]) sum = fmaf(g[i], f[i], sum);
                    da[i] *= p * g[i];
                    db[i] *= p * g[i];
                    f[i] *= p;
                }
            } else {
#pragma unroll
                for (i = 0; i < 8; i++) f[i] = da[i] = db[i] = 0.0f;
            }
            if (a.dx.data) GMM__NAME(gmm__act_gradients)(&a, w.row, &q, da, db);
            if (a.y.data) gmm__store8(GMM__FIXED, &a.y, w.row, &q, f);
        }
        if (!a.dprob) continue;
        sum = gmm__warp_sum(sum);
        if (team > 1) { /* the block's */
            int32_t i;
            if (gmm__lane() == 0) sums[gmm__warp()] = sum;
            __syncthreads();
            for (i = 0, sum = 0.0f; i < GMM__ELEM_WARPS; i++) sum += sums[i];
            __syncthreads();
        }
        if (w.part == 0 && gmm__lane() == 0) a.dprob[w.row] = sum;
    }
}

/* Rows of a token that are read at once. */
#define GMM__BATCH (GMM__FIXED == GMM_BF16 || GMM__FIXED == GMM_F16 ? 4 : 2)

/* out[t] = sum over slots of (probs) rows[row], in slot order. Where the rows stand is read one batch ahead. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_unpermute_fwd)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    gmm__grid_loop w = gmm__grid_loop_begin((a.hidden - 1) / GMM__ELEM_SPAN + 1, 1);
    float sum[8], p[4], next_p[4];
    int32_t row[4], next_row[4], i = 0, j, k;
#pragma unroll
    for (k = 0; k < 8; k++) sum[k] = 0.0f;
#pragma unroll
    for (j = 0; j < GMM__BATCH; j++)
        next_row[j] = w.row < a.tokens ? gmm__slot_row(&a, w.row, j, &next_p[j]) : -1;
    while (w.row < a.tokens) {
        const gmm__lane_cols q = gmm__lane_cols_of(GMM__WIDE(a.wide), (int32_t)w.part, (int32_t)a.hidden);
        const uint32_t token = w.row;
        gmm__raw8 r[4];
#pragma unroll
        for (j = 0; j < GMM__BATCH; j++) {
            row[j] = next_row[j];
            p[j] = next_p[j];
            if (row[j] >= 0 && q.n[0] > 0) r[j] = gmm__load8(GMM__FIXED, &a.src, row[j], &q);
        }
        i += GMM__BATCH;
        if (i >= a.topk) {
            i = 0;
            gmm__grid_loop_next(&w);
        }
#pragma unroll
        for (j = 0; j < GMM__BATCH; j++)
            next_row[j] = w.row < a.tokens ? gmm__slot_row(&a, w.row, i + j, &next_p[j]) : -1;
#pragma unroll
        for (j = 0; j < GMM__BATCH; j++)
            if (row[j] >= 0 && q.n[0] > 0) {
                float v[8];
                gmm__decode8(GMM__FIXED, &a.src, &r[j], v);
#pragma unroll
                for (k = 0; k < 8; k++) sum[k] = fmaf(p[j], v[k], sum[k]);
            }
        if (i == 0) {
            if (q.n[0] > 0) gmm__store8(GMM__FIXED, &a.dst, token, &q, sum);
#pragma unroll
            for (k = 0; k < 8; k++) sum[k] = 0.0f;
        }
    }
}
#undef GMM__BATCH

/* drows[r] = (probs) dout[token of r]; zeros in padding. Two spans per task. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_unpermute_bwd)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t live = gmm__live_rows(a.sizes, a.experts, a.capacity, a.fault), slots = a.tokens * a.topk;
    const int64_t rows = a.tail_zero ? a.capacity : live;
    gmm__grid_loop w = gmm__grid_loop_begin((a.hidden - 1) / (2 * GMM__ELEM_SPAN) + 1, 1);
    for (; w.row < rows; gmm__grid_loop_next(&w)) {
        const int32_t slot = w.row < live ? gmm__map_entry(a.slot_of, w.row, slots, a.fault) : -1;
        const float p = slot >= 0 && a.probs ? a.probs[slot] : 1.0f;
        gmm__raw8 r[2];
        gmm__lane_cols q[2];
        int32_t j, k;
#pragma unroll
        for (j = 0; j < 2; j++) {
            q[j] = gmm__lane_cols_of(GMM__WIDE(a.wide), (int32_t)(2 * w.part) + j, (int32_t)a.hidden);
            if (slot >= 0 && q[j].n[0] > 0)
                r[j] = gmm__load8(GMM__FIXED, &a.src, (uint32_t)slot / (uint32_t)a.topk, &q[j]);
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (q[j].n[0] > 0) {
                float v[8];
                if (slot >= 0) gmm__decode8(GMM__FIXED, &a.src, &r[j], v);
#pragma unroll
                for (k = 0; k < 8; k++) v[k] = slot >= 0 ? p * v[k] : 0.0f;
                gmm__store8(GMM__FIXED, &a.dst, w.row, &q[j], v);
            }
    }
}

/* dprobs[slot] = dout[token] . rows[row]: a warp per slot. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 6)
GMM__NAME(gmm_unpermute_dots)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    gmm__grid_loop w = gmm__grid_loop_begin(a.topk, 1);
    for (; w.row < a.tokens; gmm__grid_loop_next(&w)) {
        const int64_t slot = (int64_t)w.row * a.topk + w.part;
        const int32_t row = gmm__map_entry(a.row_of, slot, a.capacity, a.fault);
        float sum = 0.0f;
        int32_t part;
        for (part = 0; row >= 0; part += 2) {
            gmm__raw8 r[2], s[2];
            gmm__lane_cols q[2];
            int32_t j, k;
#pragma unroll
            for (j = 0; j < 2; j++) {
                q[j] = gmm__lane_cols_of(GMM__WIDE(a.wide), part + j, (int32_t)a.hidden);
                if (q[j].n[0] > 0) r[j] = gmm__load8(GMM__FIXED, &a.src, w.row, &q[j]);
                if (q[j].n[0] > 0) s[j] = gmm__load8(GMM__FIXED, &a.dst, row, &q[j]);
            }
            if (q[0].n[0] <= 0) break;
#pragma unroll
            for (j = 0; j < 2; j++)
                if (q[j].n[0] > 0) {
                    float u[8], v[8];
                    gmm__decode8(GMM__FIXED, &a.src, &r[j], u);
                    gmm__decode8(GMM__FIXED, &a.dst, &s[j], v);
#pragma unroll
                    for (k = 0; k < 8; k++) sum = fmaf(u[k], v[k], sum);
                }
        }
        sum = gmm__warp_sum(sum);
        if (gmm__lane() == 0) a.dprobs[slot] = sum;
    }
}

#undef GMM__WIDE
#undef GMM__FIXED
#undef GMM__NAME
#undef GMM__TAG

