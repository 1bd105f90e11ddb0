/* CPU GEMM: register tiles, packed panels, and one block of a product. */

static float gmm__alpha(const gmm_linear *d, int64_t g) {
    return d->alpha ? d->alpha[d->alpha_per_group ? g : 0] : 1.0f;
}

/* The loops over a tile are always unrolled, so that its accumulators are in registers at any optimisation level. */
#if defined(__CUDACC__) /* nvcc accepts neither pragma; it compiles host code at -O3, which unrolls */
#define GMM__UNROLL
#elif defined(__clang__)
#define GMM__UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define GMM__UNROLL _Pragma("GCC unroll 16")
#else
#define GMM__UNROLL
#endif

/* --- the register tile: c[mr][nr] += sum over k of a[k][mr] b[k][nr], accumulated in the order of k --- */

enum {
    GMM__MC = 240, GMM__NC = 512, GMM__KC = 256, /* cache block: panels of A and B and the block of C fit the L2 */
    GMM__MR_512 = 12, GMM__NR_512 = 32, GMM__MR = 6, GMM__NR = 16
};

static void gmm__tile_plain(int64_t kc, const float *a, const float *b, float *c, int64_t ldc) {
    int64_t k;
    int i, j;
    for (i = 0; i < GMM__MR; i++, c += ldc) {
        float acc[GMM__NR];
        for (j = 0; j < GMM__NR; j++) acc[j] = c[j];
        for (k = 0; k < kc; k++)
            for (j = 0; j < GMM__NR; j++) acc[j] += a[k * GMM__MR + i] * b[k * GMM__NR + j];
        for (j = 0; j < GMM__NR; j++) c[j] = acc[j];
    }
}

#ifdef GMM__X86
__attribute__((target("avx2,fma"))) static void gmm__tile_avx2(int64_t kc, const float *a, const float *b, float *c,
                                                                int64_t ldc) {
    __m256 acc[GMM__MR][2];
    int64_t k;
    int i;
    GMM__UNROLL
    for (i = 0; i < GMM__MR; i++) {
        acc[i][0] = _mm256_loadu_ps(c + i * ldc);
        acc[i][1] = _mm256_loadu_ps(c + i * ldc + 8);
    }
    for (k = 0; k < kc; k++, a += GMM__MR, b += GMM__NR) {
        const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
        GMM__UNROLL
        for (i = 0; i < GMM__MR; i++) {
            const __m256 ai = _mm256_broadcast_ss(a + i);
            acc[i][0] = _mm256_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(ai, b1, acc[i][1]);
        }
    }
    GMM__UNROLL
    for (i = 0; i < GMM__MR; i++) {
        _mm256_storeu_ps(c + i * ldc, acc[i][0]);
        _mm256_storeu_ps(c + i * ldc + 8, acc[i][1]);
    }
}

__attribute__((target("avx512f"))) static void gmm__tile_avx512(int64_t kc, const float *a, const float *b, float *c,
                                                                 int64_t ldc) {
    __m512 acc[GMM__MR_512][2];
    int64_t k;
    int i;
    GMM__UNROLL
    for (i = 0; i < GMM__MR_512; i++) {
        acc[i][0] = _mm512_loadu_ps(c + i * ldc);
        acc[i][1] = _mm512_loadu_ps(c + i * ldc + 16);
    }
    for (k = 0; k < kc; k++, a += GMM__MR_512, b += GMM__NR_512) {
        const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
        GMM__UNROLL
        for (i = 0; i < GMM__MR_512; i++) {
            const __m512 ai = _mm512_set1_ps(a[i]);
            acc[i][0] = _mm512_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(ai, b1, acc[i][1]);
        }
    }
    GMM__UNROLL
    for (i = 0; i < GMM__MR_512; i++) {
        _mm512_storeu_ps(c + i * ldc, acc[i][0]);
        _mm512_storeu_ps(c + i * ldc + 16, acc[i][1]);
    }
}
#endif

typedef struct gmm__cpu_tile {
    int mr, nr;
    void (*run)(int64_t kc, const float *a, const float *b, float *c, int64_t ldc);
} gmm__cpu_tile;

/* By gmm_context.cpu_level. */
static const gmm__cpu_tile gmm__cpu_tiles[] = {
    { GMM__MR, GMM__NR, gmm__tile_plain },
    { GMM__MR, GMM__NR, gmm__tile_plain },
#ifdef GMM__X86
    { GMM__MR, GMM__NR, gmm__tile_avx2 },
    { GMM__MR_512, GMM__NR_512, gmm__tile_avx512 },
#endif
};

/* --- one block of a product: C[m][n] = sum over k of A(i, k) B(j, k), C in fp32, ld GMM__NC --- */

/* Rows of a token matrix that are gathered: row r of the product is row at[r] / div of the matrix, or a row of zeros
   where the entry is negative or past the matrix. at NULL: row r is row r. */
typedef struct gmm__cpu_index {
    const int32_t *at;
    int64_t div, rows; /* divisor; rows of the matrix */
} gmm__cpu_index;

/* The index of the operand in a role of a linear call. */
static gmm__cpu_index gmm__cpu_index_of(const gmm_linear *d, int role) {
    gmm__cpu_index index;
    index.at = role == GMM__X_ ? d->x_index : role == GMM__DY ? d->dy_index : NULL;
    index.div = d->index_div;
    index.rows = d->index_rows;
    return index;
}
/* The row of the matrix that is row r of the product; -1: zeros. */
static int64_t gmm__cpu_indexed_row(const gmm__cpu_index *index, int64_t r) {
    int64_t row;
    if (!index->at) return r;
    if (index->at[r] < 0) return -1;
    row = index->at[r] / index->div;
    return row < index->rows ? row : -1;
}
/* Sets GMM_FAULT_INDEX if an entry of the first `live` rows is past the matrix. */
static void gmm__cpu_index_faults(const gmm__cpu_index *index, int64_t live, uint32_t *fault) {
    int64_t r;
    int past = 0;
    if (!index->at || !fault) return;
    for (r = 0; r < live; r++) past |= index->at[r] >= 0 && index->at[r] / index->div >= index->rows;
    if (past) *fault |= (uint32_t)GMM_FAULT_INDEX;
}

/* An operand A or B, in fp32 or 16 bits: element (i, k) is base[i * stride_i + k * stride_k], and one of the strides is
   1. Quantized: element k of line first_line + i of the view. With an index, the row of element (i, k) in the token
   matrix, which is i or k by `along_rows`, counts from first_row and is looked up. */
typedef struct gmm__cpu_operand {
    gmm_dtype dtype;
    int quantized, along_rows;
    const void *base;
    int64_t stride_i, stride_k;
    gmm__qview view;
    int64_t first_line, first_row;
    gmm__cpu_index index;
} gmm__cpu_operand;
/* A constant where the build has no quantized operands, so that their code is left out. */
#ifdef GMM_NO_QUANT
#define GMM__QUANTIZED(operand) ((void)(operand), 0)
#else
#define GMM__QUANTIZED(operand) (operand)->quantized
#endif

/* Address of element (i, k) of an operand of floats; NULL: it is in a row of zeros. */
static const char *gmm__cpu_element(const gmm__cpu_operand *f, int64_t i, int64_t k) {
    if (f->index.at) {
        const int64_t row = gmm__cpu_indexed_row(&f->index, f->first_row + (f->along_rows ? k : i));
        if (row < 0) return NULL;
        if (f->along_rows) k = row;
        else i = row;
    }
    return (const char *)f->base + (i * f->stride_i + k * f->stride_k) * (gmm_dtype_bits(f->dtype) / 8);
}

/* Loads n elements of a row; src NULL: zeros. */
static void gmm__cpu_load(gmm_dtype dtype, const void *src, float *dst, int64_t n) {
    if (src) gmm__row_load(dtype, src, dst, n);
    else memset(dst, 0, (size_t)n * sizeof *dst);
}

/* Writes rows row[0..n) as columns of a panel: panel[k * width + i] = row[i][k]. */
static void gmm__cpu_transpose(float row[][GMM__KC], int n, int64_t kc, int width, float *panel) {
    int64_t k = 0;
    int i;
#ifdef GMM__X86
    if (n == 4)
        for (; k + 4 <= kc; k += 4) {
            __m128 a = _mm_loadu_ps(row[0] + k), b = _mm_loadu_ps(row[1] + k), c = _mm_loadu_ps(row[2] + k),
                   d = _mm_loadu_ps(row[3] + k);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(panel + k * width, a);
            _mm_storeu_ps(panel + (k + 1) * width, b);
            _mm_storeu_ps(panel + (k + 2) * width, c);
            _mm_storeu_ps(panel + (k + 3) * width, d);
        }
#endif
    for (; k < kc; k++)
        for (i = 0; i < n; i++) panel[k * width + i] = row[i][k];
}

/* Packs `count` rows of an operand as panels [ceil(count / width)][kc][width] of fp32, and pads the last one with
   zeros. */
static void gmm__cpu_pack(const gmm__cpu_operand *f, int64_t count, int64_t k0, int64_t kc, int width, float *panel) {
    int64_t i0, k;
    for (i0 = 0; i0 < count; i0 += width, panel += kc * width) {
        const int rows = count - i0 < width ? (int)(count - i0) : width;
        int i;
        if (!GMM__QUANTIZED(f) && f->along_rows) {
            for (k = 0; k < kc; k++) {
                gmm__cpu_load(f->dtype, gmm__cpu_element(f, i0, k0 + k), panel + k * width, rows);
                for (i = rows; i < width; i++) panel[k * width + i] = 0.0f;
            }
        } else {
            float row[4][GMM__KC];
            for (i = 0; i < rows; i += 4) {
                const int n = rows - i < 4 ? rows - i : 4;
                int r;
                for (r = 0; r < n; r++)
                    if (GMM__QUANTIZED(f)) gmm__qview_load(&f->view, f->first_line + i0 + i + r, k0, kc, 0, row[r]);
                    else gmm__cpu_load(f->dtype, gmm__cpu_element(f, i0 + i + r, k0), row[r], kc);
                gmm__cpu_transpose(row, n, kc, width, panel + i);
            }
            for (i = rows; i < width; i++)
                for (k = 0; k < kc; k++) panel[k * width + i] = 0.0f;
        }
    }
}

/* One thread's panels of A and of B, and its block of C. */
typedef struct gmm__cpu_scratch { float *a, *b, *c; } gmm__cpu_scratch;

/* Number of floats of each of the three: an upper bound for a call, a multiple of a cache line. */
typedef struct gmm__cpu_extent { int64_t a, b, c; } gmm__cpu_extent;
static gmm__cpu_extent gmm__cpu_extent_of(const gmm__call *call, const gmm__cpu_tile *tile) {
    const int fwd = call->op == GMM_OP_LINEAR_FWD, wgrad = call->op == GMM_OP_LINEAR_WGRAD;
    const int64_t rows = gmm__min_i64(wgrad ? call->out : call->rows, GMM__MC);
    const int64_t m = gmm__round_up(rows, tile->mr);
    const int64_t n = gmm__round_up(gmm__min_i64(fwd ? call->out : call->in, GMM__NC), tile->nr);
    /* the Hadamard transform of wgrad's operands mixes 16 rows, and leaves no zeros in the last block */
    const int64_t max_k = wgrad ? gmm__round_up(gmm__min_i64(call->rows, GMM__KC), 16) : fwd ? call->in : call->out;
    const int64_t k = gmm__min_i64(max_k, GMM__KC);
    gmm__cpu_extent e;
    e.a = gmm__round_up(m * k, 16);
    e.b = gmm__round_up(k * n, 16);
    e.c = m * GMM__NC;
    return e;
}
static size_t gmm__cpu_extent_bytes(gmm__cpu_extent e) { return sizeof(float) * (size_t)(e.a + e.b + e.c); }
static gmm__cpu_scratch gmm__cpu_scratch_at(void *base, gmm__cpu_extent e, int32_t thread) {
    gmm__cpu_scratch s;
    s.a = (float *)(void *)((char *)base + (size_t)thread * gmm__cpu_extent_bytes(e));
    s.b = s.a + e.a;
    s.c = s.b + e.b;
    return s;
}

/* Rows [first, first + count) of an operand, packed as a panel. */
typedef struct gmm__cpu_panel {
    const gmm__cpu_operand *operand;
    int64_t first, count;
    const float *packed;
} gmm__cpu_panel;
static gmm__cpu_panel gmm__cpu_panel_of(const gmm__cpu_operand *operand, int64_t first, int64_t rows, int width,
                                        const float *packed) {
    gmm__cpu_panel p;
    p.operand = operand;
    p.first = first;
    p.count = gmm__min_i64(rows - first, width);
    p.packed = packed;
    return p;
}
static float gmm__cpu_panel_scale(const gmm__cpu_panel *p, int64_t row, int64_t k) {
    return gmm__qview_factor(&p->operand->view, p->operand->first_line + p->first + row, k / 128, 1);
}

/* Promotes a register tile of one block of 128 elements along k, which begins at k: its accumulators times the scales
   of A and of B are added to c. */
static void gmm__cpu_promote(const gmm__cpu_tile *tile, const gmm__cpu_panel *a, const gmm__cpu_panel *b, int64_t k,
                             int64_t kc, float *c) {
    float acc[GMM__MR_512 * GMM__NR_512] = { 0 }, scale_b[GMM__NR_512];
    int64_t i, j;
    tile->run(kc, a->packed, b->packed, acc, tile->nr);
    for (j = 0; j < b->count; j++) scale_b[j] = gmm__cpu_panel_scale(b, j, k);
    for (i = 0; i < a->count; i++) {
        const float scale = gmm__cpu_panel_scale(a, i, k), lift = gmm__scale_lift(scale);
        const float scale_a = scale * (1.0f / lift);
        for (j = 0; j < b->count; j++) c[i * GMM__NC + j] += acc[i * tile->nr + j] * scale_a * (scale_b[j] * lift);
    }
}

static void gmm__cpu_block(const gmm__cpu_tile *tile, const gmm__cpu_scratch *s, const gmm__cpu_operand *A, int64_t m,
                           const gmm__cpu_operand *B, int64_t n, int64_t K) {
    const int64_t mp = gmm__round_up(m, tile->mr), np = gmm__round_up(n, tile->nr);
    const int promote = GMM__QUANTIZED(A) && gmm_block_along(A->view.scaling) == 128;
    const int64_t step = promote ? 128 : GMM__KC;
    int64_t i, j, k;
    for (i = 0; i < mp; i++) memset(s->c + i * GMM__NC, 0, (size_t)np * sizeof(float));
    for (k = 0; k < K; k += step) {
        const int64_t kc = gmm__min_i64(K - k, step);
        gmm__cpu_pack(A, m, k, kc, tile->mr, s->a);
        gmm__cpu_pack(B, n, k, kc, tile->nr, s->b);
        for (j = 0; j < np; j += tile->nr)
            for (i = 0; i < mp; i += tile->mr) {
                const gmm__cpu_panel a = gmm__cpu_panel_of(A, i, m, tile->mr, s->a + i * kc);
                const gmm__cpu_panel b = gmm__cpu_panel_of(B, j, n, tile->nr, s->b + j * kc);
                float *c = s->c + i * GMM__NC + j;
                if (promote) gmm__cpu_promote(tile, &a, &b, k, kc, c);
                else tile->run(kc, a.packed, b.packed, c, GMM__NC);
            }
    }
}

/* The scale of line l that applies to whole sums: that of TENSOR or ROW, or the amax of NV16. */
static float gmm__cpu_outer_scale(const gmm__cpu_operand *f, int64_t l) {
    const gmm__qview *v = &f->view;
    if (!GMM__QUANTIZED(f)) return 1.0f;
    if (v->scaling == GMM_SCALING_NV16) return v->amax[v->per_line ? l : 0];
    return v->scaling == GMM_SCALING_TENSOR || v->scaling == GMM_SCALING_ROW ? gmm__qview_factor(v, l, 0, 1) : 1.0f;
}
/* Multiplies the accumulators of line i of A by alpha, the outer scales of A and B, and 1 / (6 e4m3_max) for each NV16
   operand. */
static void gmm__cpu_scale_row(float *acc, int64_t n, float alpha, const gmm__cpu_operand *A, int64_t i,
                               const gmm__cpu_operand *B) {
    const float a = GMM__QUANTIZED(A) && A->view.scaling == GMM_SCALING_NV16 ? 6.0f * A->view.e4m3_max : 1.0f;
    const float b = GMM__QUANTIZED(B) && B->view.scaling == GMM_SCALING_NV16 ? 6.0f * B->view.e4m3_max : 1.0f;
    const float outer = gmm__cpu_outer_scale(A, A->first_line + i), inverse = 1.0f / (a * b);
    const int moderate = gmm__scale_moderate(alpha) && gmm__scale_moderate(outer);
    const int by_line = GMM__QUANTIZED(B) && (B->view.scaling == GMM_SCALING_ROW || B->view.per_line);
    int64_t j;
    for (j = 0; j < n;) { /* consecutive columns with the same scale */
        const float column = gmm__cpu_outer_scale(B, B->first_line + j);
        const int64_t end = by_line ? j + 1 : n;
        if (moderate && gmm__scale_moderate(column))
            for (; j < end; j++) acc[j] *= alpha * outer * column * inverse;
        else
            for (; j < end; j++) acc[j] = gmm__scale_sum(acc[j], alpha, outer, column, inverse);
    }
}

/* acc = alpha acc + addend s over one row. `addend` may be NULL. */
static void gmm__cpu_scale_add_row(float *acc, int64_t n, float alpha, const float *addend, float s) {
    int64_t i;
    if (alpha != 1.0f)
        for (i = 0; i < n; i++) acc[i] *= alpha;
    if (addend)
        for (i = 0; i < n; i++) acc[i] += addend[i] * s;
}

/* dst = (alpha acc + addend s) + beta dst over one row; beta 0 does not read dst. `addend` may be NULL. */
static void gmm__cpu_store_row(float *acc, int64_t n, float alpha, const float *addend, float s, float beta,
                               gmm_dtype dtype, void *dst) {
    int64_t i;
    gmm__cpu_scale_add_row(acc, n, alpha, addend, s);
    if (beta != 0.0f) {
        float previous[GMM__NC];
        gmm__row_load(dtype, dst, previous, n);
        for (i = 0; i < n; i++) acc[i] += beta * previous[i];
    }
    gmm__row_store(dtype, dst, acc, n);
}

