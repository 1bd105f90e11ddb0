/* ................................................................................................... Activation ... */

/* Column of the gate that output column j reads (gmm_glu_gate_column in 32 bits), and the distance from the gate
   column to the linear column. */
GMM__DEVICE int32_t gmm__act_gate_column(int32_t j, int32_t interleave) {
    const uint32_t block = interleave ? (uint32_t)j / (uint32_t)interleave : 0u;
    return j + (int32_t)block * interleave;
}
GMM__DEVICE int32_t gmm__act_linear_offset(const gmm__act_args *a) { return a->interleave ? a->interleave : a->ffn; }

/* Source row or column of row or column i of the destination: from halves to blocks or, `inverse`, from blocks to
   halves. All arguments count the same unit. */
GMM__DEVICE uint32_t gmm__glu_source(uint32_t i, uint32_t ffn, uint32_t block, int32_t inverse) {
    const uint32_t half = i >= ffn, block_index = i / block;
    if (inverse) return (uint32_t)gmm__act_gate_column((int32_t)(i - half * ffn), (int32_t)block) + half * block;
    return (block_index & 1u) * ffn + (block_index >> 1) * block + (i - block_index * block);
}

/* Warps that share a row when dprob is computed: all warps of a CTA for long rows, else one. */
static __host__ __device__ __forceinline__ GMM__UNUSED int32_t gmm__act_warps_per_row(int32_t ffn) {
    return ffn > (GMM__ELEM_WARPS - 1) * GMM__ELEM_SPAN ? GMM__ELEM_WARPS : 1;
}

/* Loads element i of a lane's eight elements from one column. */
GMM__DEVICE void gmm__load_element(const gmm__view *m, int64_t row, int64_t col, int32_t i, gmm__raw8 *r) {
    if (m->dtype == GMM_F32) r->w[i] = ((const uint32_t *)m->data)[row * m->ld + col];
    else r->w[i / 2] |= (uint32_t)((const uint16_t *)m->data)[row * m->ld + col] << (i & 1) * 16;
}

/* Deinterleaves pairs: `first` and `second` hold a0 b0 a1 b1 ...; afterwards `first` holds all a and `second` all b. */
GMM__DEVICE void gmm__deinterleave(gmm_dtype dtype, gmm__raw8 *first, gmm__raw8 *second) {
    const gmm__raw8 u = *first, v = *second;
    int32_t i;
#pragma unroll
    for (i = 0; i < 4; i++) {
        if (dtype == GMM_F32) {
            first->w[i] = u.w[2 * i];
            first->w[4 + i] = v.w[2 * i];
            second->w[i] = u.w[2 * i + 1];
            second->w[4 + i] = v.w[2 * i + 1];
        } else {
            const uint32_t low = i < 2 ? u.w[2 * i] : v.w[2 * i - 4], high = i < 2 ? u.w[2 * i + 1] : v.w[2 * i - 3];
            first->w[i] = __byte_perm(low, high, 0x5410);
            second->w[i] = __byte_perm(low, high, 0x7632);
        }
    }
}

/* Raw inputs of eight activations. */
typedef struct gmm__act_operands {
    /* GMM__GLU_PAIRS: a and b hold the interleaved pairs of the first and of the second four outputs */
    gmm__raw8 a, b, dy;
} gmm__act_operands;

/* Raises `maximum`, the bits of an absolute value, to those of a lane's elements. NaN does not count. */
GMM__DEVICE uint32_t gmm__act_max8(uint32_t maximum, const gmm__lane_cols *cols, const float v[8]) {
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++)
        if (i % 4 < cols->n[i / 4]) maximum = gmm_max_abs_f32(maximum, gmm_f32_bits(v[i]));
    return maximum;
}
/* The maximum of the rows that a warp has computed of one group, by lane. The amax in device memory is raised once per
   group and warp, since all warps access the memory that holds it. */
typedef struct gmm__group_amax {
    int32_t group;
    uint32_t maximum; /* bits of an absolute value */
} gmm__group_amax;

/* Raises the group's amax. `dtype`: to which elements are rounded where they are stored. The amax is loaded first,
   since most values do not raise it. All lanes call it. */
GMM__DEVICE void gmm__group_amax_store(const gmm__act_args *a, gmm_dtype dtype, const gmm__group_amax *s) {
    uint32_t *dst = a->amax + s->group, maximum = __reduce_max_sync(0xFFFFFFFFu, s->maximum);
    if (dtype != GMM_F32)
        maximum = gmm_f32_bits(gmm_widen(dtype, (uint16_t)gmm_pack2(dtype, gmm_f32_from_bits(maximum), 0.0f)));
    if (gmm__lane() == 0 && maximum && maximum > *(volatile uint32_t *)dst) atomicMax(dst, maximum);
}
/* Takes the maximum of elements of a row, which is not before the last one. All lanes call it. */
GMM__DEVICE void gmm__group_amax_add(const gmm__act_args *a, gmm_dtype dtype, gmm__group_amax *s, uint32_t row,
                                     uint32_t maximum) {
    const int64_t *offsets = a->valid_rows - a->groups;
    if (row >= offsets[s->group + 1]) {
        gmm__group_amax_store(a, dtype, s);
        gmm_find_group64(offsets, a->groups, row, &s->group);
        s->maximum = 0;
    }
    s->maximum = max(s->maximum, maximum);
}
