/* ..................................................................................................... Elements ... */

GMM__DEVICE int32_t gmm__lane(void) { return (int32_t)(threadIdx.x & 31u); }
GMM__DEVICE int32_t gmm__warp(void) { return (int32_t)(threadIdx.x >> 5); }

/* Loads or stores one element. */
GMM__DEVICE float gmm__load_f32(const gmm__view *m, int64_t row, int64_t col) {
    const int64_t i = row * m->ld + col;
    if (m->dtype == GMM_F32) return ((const float *)m->data)[i];
    return gmm_widen(m->dtype, ((const uint16_t *)m->data)[i]);
}
GMM__DEVICE void gmm__store_f32(const gmm__view *m, int64_t row, int64_t col, float v) {
    const int64_t i = row * m->ld + col;
    if (m->dtype == GMM_F32) ((float *)m->data)[i] = v;
    else ((uint16_t *)m->data)[i] = (uint16_t)gmm_pack2(m->dtype, v, 0.0f);
}

/* The eight columns of a lane: two vectors of 4 consecutive columns, of which n[] exist (n may be below 0). In
   16-bit rows the two vectors are adjacent, so that one 16-byte access covers both. In fp32 rows each vector is
   adjacent to that of the previous lane, so that the accesses of a warp are contiguous: writes of half a sector are
   slow. */
typedef struct gmm__lane_cols { int32_t col[2], n[2]; } gmm__lane_cols;

GMM__DEVICE gmm__lane_cols gmm__lane_cols_at(int32_t first, int32_t second, int32_t cols) {
    gmm__lane_cols lane_cols;
    lane_cols.col[0] = first;
    lane_cols.col[1] = second;
    lane_cols.n[0] = min(cols - first, 4);
    lane_cols.n[1] = min(cols - second, 4);
    return lane_cols;
}
/* The columns of this lane in part `part` of a row of `cols` columns. `wide`: the layout of fp32 rows. */
GMM__DEVICE gmm__lane_cols gmm__lane_cols_of(int wide, int32_t part, int32_t cols) {
    const int32_t first = part * GMM__ELEM_SPAN + gmm__lane() * (wide ? 4 : 8);
    return gmm__lane_cols_at(first, first + (wide ? 128 : 4), cols);
}

/* Eight elements in their memory format; 16-bit elements fill the first four words. Loading and decoding are
   separate functions so that a kernel can have several loads in flight. Columns beyond the row read as 0 and are not
   written. `static_dtype` is the dtype of the kernel instance, GMM_NONE if it is read at run time. */
typedef struct gmm__raw8 { uint32_t w[8]; } gmm__raw8;

/* Access width of a lane's two vectors: 2 one access for both, 1 one access each (the second may be absent), 0
   element by element. */
GMM__DEVICE int gmm__vector_access(gmm_dtype static_dtype, const gmm__view *m, const gmm__lane_cols *cols) {
    if (static_dtype != GMM_NONE) return static_dtype == GMM_F32 ? 1 : 2;
    if (!m->vec || cols->n[0] < 4 || (cols->n[1] < 4 && cols->n[1] > 0) || ((cols->col[0] | cols->col[1]) & 3))
        return 0;
    return m->dtype != GMM_F32 && cols->n[1] == 4 && cols->col[1] - cols->col[0] == 4 && (cols->col[0] & 4) == 0 ? 2
                                                                                                               : 1;
}

GMM__DEVICE gmm__raw8 gmm__load8(gmm_dtype static_dtype, const gmm__view *m, int64_t row, const gmm__lane_cols *cols) {
    const gmm_dtype dtype = static_dtype != GMM_NONE ? static_dtype : m->dtype;
    const int access = gmm__vector_access(static_dtype, m, cols);
    gmm__raw8 r = GMM_ZERO;
    int32_t i, j;
    if (dtype == GMM_F32) {
        const uint32_t *p = (const uint32_t *)m->data + row * m->ld;
#pragma unroll
        for (j = 0; j < 2; j++)
            if (access && cols->n[j] > 0) {
                const uint4 v = *(const uint4 *)(p + cols->col[j]);
                r.w[4 * j] = v.x; r.w[4 * j + 1] = v.y; r.w[4 * j + 2] = v.z; r.w[4 * j + 3] = v.w;
            } else {
#pragma unroll
                for (i = 0; i < 4; i++) r.w[4 * j + i] = i < cols->n[j] ? p[cols->col[j] + i] : 0u;
            }
    } else {
        const uint16_t *p = (const uint16_t *)m->data + row * m->ld;
        if (access == 2) {
            const uint4 v = *(const uint4 *)(p + cols->col[0]);
            r.w[0] = v.x; r.w[1] = v.y; r.w[2] = v.z; r.w[3] = v.w;
            return r;
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (access && cols->n[j] > 0) {
                const uint2 v = *(const uint2 *)(p + cols->col[j]);
                r.w[2 * j] = v.x; r.w[2 * j + 1] = v.y;
            } else {
#pragma unroll
                for (i = 0; i < 4; i++)
                    if (i < cols->n[j]) r.w[2 * j + i / 2] |= (uint32_t)p[cols->col[j] + i] << (i & 1) * 16;
            }
    }
    return r;
}

GMM__DEVICE void gmm__decode8(gmm_dtype static_dtype, const gmm__view *m, const gmm__raw8 *r, float v[8]) {
    const gmm_dtype dtype = static_dtype != GMM_NONE ? static_dtype : m->dtype;
    int32_t i;
    if (dtype == GMM_F32) {
#pragma unroll
        for (i = 0; i < 8; i++) v[i] = gmm_f32_from_bits(r->w[i]);
    } else if (dtype == GMM_F16) {
#pragma unroll
        for (i = 0; i < 8; i++) v[i] = gmm_widen(GMM_F16, (uint16_t)(r->w[i / 2] >> (i & 1) * 16));
    } else {
#pragma unroll
        for (i = 0; i < 8; i++) v[i] = gmm_f32_from_bits(i & 1 ? r->w[i / 2] & 0xFFFF0000u : r->w[i / 2] << 16);
    }
}

GMM__DEVICE void gmm__store8(gmm_dtype static_dtype, const gmm__view *m, int64_t row, const gmm__lane_cols *cols,
                             const float v[8]) {
    const gmm_dtype dtype = static_dtype != GMM_NONE ? static_dtype : m->dtype;
    const int access = gmm__vector_access(static_dtype, m, cols);
    int32_t i, j;
    if (dtype == GMM_F32) {
        float *p = (float *)m->data + row * m->ld;
#pragma unroll
        for (j = 0; j < 2; j++)
            if (access && cols->n[j] > 0) {
                *(float4 *)(p + cols->col[j]) = make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
            } else {
#pragma unroll
                for (i = 0; i < 4; i++)
                    if (i < cols->n[j]) p[cols->col[j] + i] = v[4 * j + i];
            }
    } else {
        uint16_t *p = (uint16_t *)m->data + row * m->ld;
        uint32_t w[4];
#pragma unroll
        for (i = 0; i < 4; i++) w[i] = gmm_pack2(dtype, v[2 * i], v[2 * i + 1]);
        if (access == 2) {
            *(uint4 *)(p + cols->col[0]) = make_uint4(w[0], w[1], w[2], w[3]);
            return;
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (access && cols->n[j] > 0) *(uint2 *)(p + cols->col[j]) = make_uint2(w[2 * j], w[2 * j + 1]);
            else {
#pragma unroll
                for (i = 0; i < 4; i++)
                    if (i < cols->n[j]) p[cols->col[j] + i] = (uint16_t)(w[2 * j + i / 2] >> (i & 1) * 16);
            }
    }
}

