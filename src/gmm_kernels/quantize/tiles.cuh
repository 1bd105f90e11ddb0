/* ................................................................................................. Quantization ... */

/* General casts. A tile is GMM_TILE rows of one group or matrix by GMM_TILE columns; a CTA processes one tile after
   another. A copy is a set of lines along its direction (gmm_quant.h, section 6): a warp processes one line at a
   time, a lane four consecutive elements of it. */
enum {
    GMM__QUANT_THREADS = 256,
    GMM__QUANT_WARPS = GMM__QUANT_THREADS / 32,
    GMM__QUANT_CODES_PITCH = GMM_TILE + 4, /* bytes between rows of codes that are transposed in shared memory */
    GMM__QUANT_TILE_BYTES = GMM_TILE * GMM_TILE * 4,
    GMM__QUANT_SHARED_BYTES = GMM__QUANT_TILE_BYTES + GMM_TILE * GMM__QUANT_CODES_PITCH,
    GMM__QUANT_SQUARES = GMM_TILE_BLOCKS * GMM_TILE_BLOCKS,
    GMM__QUANT_PER_SM = 3,
    /* CTAs per multiprocessor of casts that may be skipped. Each CTA reads the word by which it skips: with 128 per
       multiprocessor a skipped cast takes 9 to 19 us, with 32 4 us. Below 32 a cast that is not skipped takes longer:
       with 24 1%, with 16 or 8 10%. */
    GMM__QUANT_SKIPPABLE_PER_SM = 32,
    GMM__TRANSPOSE_PER_SM = 4
};

/* What the source of a cast is; a constant of each kernel. */
typedef enum gmm__cast_source {
    GMM__CAST_OF_MATRIX,
    GMM__CAST_OF_ACT,      /* the result of an activation, whose inputs gmm__quant_args.src has */
    GMM__CAST_OF_GRADIENT  /* the gradient of these inputs, which has their layout */
} gmm__cast_source;
/* The activation of these casts. Rows and columns are those of its result. */
typedef struct gmm__act_source {
    gmm__cast_source source;
    gmm_act_kind kind;
    gmm_act_coef coef;
    int32_t ffn, gated, interleave, layout; /* as in gmm__act_args. Layouts: GMM__GLU_SPLIT; GMM__CAST_OF_ACT also has
                          GMM__GLU_PAIRS */
    int32_t linear;    /* columns from gate to linear ones or, of GMM__GLU_PAIRS, to a lane's next eight elements */
    const float *prob; /* [rows]; NULL: ones */
    const uint16_t *dy; /* GMM__CAST_OF_GRADIENT, else NULL: the gradient of the result, [rows][ffn], dy_ld elements
                          from row to row */
    int64_t dy_ld;
    float *dots;       /* [parts of GMM_ACT_DOT_COLS columns][rows]: dy times the result, summed over a part's columns,
                          of which dprob is the sum; NULL: not wanted */
} gmm__act_source;

/* Which kernels may serve a cast: those of the value and of the values before it. */
typedef enum gmm__vectorized {
    GMM__VECTORIZED_NO,      /* those of any shape and alignment: GMM__BODY_QUANTIZE_AMAX, GMM__BODY_QUANTIZE */
    GMM__VECTORIZED,         /* GMM__BODY_AMAX, _SCALED, _NV, _MX: all rows are multiples of aligned vectors */
    GMM__VECTORIZED_HADAMARD /* of these the instances with GMM__HADAMARD, for a BF16 source of which a copy is
                                transformed or rounded stochastically */
} gmm__vectorized;

typedef struct gmm__quant_args {
    gmm_mat src, rowwise, columnwise; /* tables in device memory; dtype GMM_NONE: absent */
    gmm_format format;
    gmm_dtype source;                 /* dtype of the source for the limits of block scales */
    int32_t grouped, phase, first_group;
    int64_t units, rows, cols;        /* rows: capacity, or rows of each matrix */
    int64_t col_tiles;
    const int64_t *offsets;           /* grouped: [units + 1] row offsets */
    const int32_t *tiles;             /* grouped: [units + 1] prefix sums of strips */
    gmm_groups groups;                /* read by the kernels themselves where warp_split is set */
    int32_t warp_split;               /* vectorized, at most 32 groups: offsets and tiles are not set */
    float *amax[2];                   /* [units]: amaxes of the rowwise and of the columnwise copy */
    float *row_amax;                  /* [rows of all units]; NULL: not needed */
    float *col_amax;                  /* [units][cols]; NULL: not needed */
    const float *scale;               /* [units], delayed scaling: encode scales; NULL: ones */
    const int32_t *skip;              /* not 0: nothing is written; NULL: 0 */
    const uint64_t *random;           /* [2] seed and offset of gmm_draw_block */
    gmm__vectorized vectorized;
    int32_t record;                   /* vectorized, delayed scaling: the casts raise the amaxes of the copies */
    /* vectorized: tiles are processed from the last to the first, since the L2 still holds the last ones */
    int32_t backward;
    /* vectorized: bytes between matrices of rowwise, columnwise and src, and between the scales of the first two */
    int64_t step[3], scale_step[2];
    gmm__act_source act;
    gmm_row_index index;              /* of gathered rows of the source */
    float *sums;                      /* vectorized, grouped: gmm_bgrad_args.partials of the source; NULL: not wanted */
    const float *sum_scale;           /* [rows]: factors of the rows in these sums; NULL: ones */
} gmm__quant_args;

/* Every kernel of a cast calls it before it accesses device memory. Waits for the predecessor, and returns whether the
   call is skipped. */
GMM__DEVICE int gmm__quant_wait_skips(const int32_t *skip) {
    gmm_pdl_wait_only();
    return skip && *skip;
}

typedef struct gmm__dequant_args {
    gmm_mat src, dst;
    gmm_direction direction;
    int32_t grouped;
    int64_t units, rows, cols, col_tiles;
    const int64_t *offsets;
    const int32_t *tiles;
} gmm__dequant_args;

typedef struct gmm__transpose_args {
    gmm_mat src, dst; /* tables in device memory */
    int64_t units, rows, cols;
} gmm__transpose_args;

/* Rows [*valid_rows, rows) of `bytes` bytes each, `pitch` bytes apart, become zeros. */
typedef struct gmm__quant_tail_args {
    uint8_t *data;
    int64_t pitch, bytes, rows;
    const int64_t *valid_rows;
    const int32_t *skip; /* not 0: nothing is written; NULL: 0 */
} gmm__quant_tail_args;

/* A strip of GMM_TILE rows of a unit, that is of a group or matrix. */
typedef struct gmm__quant_strip {
    int64_t unit;
    int64_t row, m;     /* first row of the strip in the unit; rows of the strip */
    int64_t rows;       /* of the unit */
    int64_t source_row; /* first row of the unit in the source */
    int64_t padded_row; /* first row of the unit where groups are padded to multiples of GMM_GROUP_ROWS */
} gmm__quant_strip;

/* The number of strips of all units, and the strip of a number. */
GMM__DEVICE int64_t gmm__quant_strips(int32_t grouped, const int32_t *tiles, int64_t units, int64_t rows) {
    return grouped ? (int64_t)tiles[units] : units * ((rows + GMM_TILE - 1) / GMM_TILE);
}
GMM__DEVICE gmm__quant_strip gmm__quant_strip_of(int32_t grouped, const int32_t *tiles, const int64_t *offsets,
                                                 int64_t units, int64_t rows, int64_t strip) {
    gmm__quant_strip p;
    if (grouped) {
        int32_t g = 0;
        gmm_find_group32(tiles, (int32_t)units, strip, &g);
        p.unit = g;
        p.source_row = offsets[g];
        p.rows = offsets[g + 1] - p.source_row;
        p.padded_row = (int64_t)tiles[g] * GMM_TILE;
        p.row = strip * GMM_TILE - p.padded_row;
    } else {
        const uint32_t strips_per_unit = (uint32_t)((rows + GMM_TILE - 1) / GMM_TILE), index = (uint32_t)strip;
        p.unit = index / strips_per_unit;
        p.row = (int64_t)(index % strips_per_unit) * GMM_TILE;
        p.source_row = p.padded_row = 0;
        p.rows = rows;
    }
    p.m = p.rows - p.row < GMM_TILE ? p.rows - p.row : (int64_t)GMM_TILE;
    return p;
}
/* View of a strip's unit in a copy. */
GMM__DEVICE gmm__qview gmm__quant_copy(const gmm_mat *m, gmm_direction direction, int32_t grouped,
                                       const gmm__quant_strip *p, int64_t cols) {
    return gmm__qview_of(m, direction, grouped, p->unit, p->source_row, p->padded_row, p->rows, cols);
}

/* Rows or columns of the tile that begins at `first` of `count`. */
GMM__DEVICE int32_t gmm__quant_extent(int64_t count, int64_t first) {
    return (int32_t)(count - first < GMM_TILE ? count - first : (int64_t)GMM_TILE);
}
/* The one rule of fp32 scales: that of an amax for a dtype whose largest value is qmax. `blocks`: 1X128 and 128X128,
   which the largest value of the source limits. */
GMM__DEVICE float gmm__quant_scale(const gmm__quant_args *a, float qmax, int32_t blocks, float amax) {
    return gmm_scale_from_amax(amax, qmax, gmm_dtype_largest(blocks ? a->source : GMM_F32), a->format.eps,
                               a->format.pow2);
}

/* Index of element (r, c) of a tile in shared memory. Columns are permuted so that accesses of four elements per
   lane, along rows and along columns, are free of bank conflicts: the lanes of a row start with different elements
   of their four. */
GMM__DEVICE int32_t gmm__quant_smem_index(int32_t r, int32_t c) { return r * GMM_TILE + (c ^ ((r >> 2) & 31)); }
/* Rotates four values to the left by `count`. */
GMM__DEVICE void gmm__quant_rotate4(float v[4], int32_t count) {
    const float a = v[0];
    if (count & 1) { v[0] = v[1]; v[1] = v[2]; v[2] = v[3]; v[3] = a; }
    if (count & 2) {
        const float b = v[0], c = v[1];
        v[0] = v[2]; v[1] = v[3]; v[2] = b; v[3] = c;
    }
}
GMM__DEVICE void gmm__quant_store_row(float *x, int32_t r, const float src[4]) {
    const int32_t lane = gmm__lane(), rotation = lane >> 3;
    float v[4] = { src[0], src[1], src[2], src[3] };
    int32_t j;
    gmm__quant_rotate4(v, rotation);
#pragma unroll
    for (j = 0; j < 4; j++) x[gmm__quant_smem_index(r, 4 * lane + ((j + rotation) & 3))] = v[j];
}
GMM__DEVICE void gmm__quant_load_row(const float *x, int32_t r, float v[4]) {
    const int32_t lane = gmm__lane(), rotation = lane >> 3;
    int32_t j;
#pragma unroll
    for (j = 0; j < 4; j++) v[j] = x[gmm__quant_smem_index(r, 4 * lane + ((j + rotation) & 3))];
    gmm__quant_rotate4(v, (4 - rotation) & 3);
}
/* Stages of strides 1 to `last` of Hadamard transforms of 2 last values each. */
GMM__DEVICE void gmm_hadamard_stages(float *v, int32_t count, int32_t last) {
    int32_t i, stride;
#pragma unroll
    for (stride = 1; stride <= last; stride *= 2)
#pragma unroll
        for (i = 0; i < count; i++)
            if (!(i & stride)) {
                const float a = v[i], b = v[i + stride];
                v[i] = gmm__fadd(a, b);
                v[i + stride] = gmm__fadd(a, gmm_f32_from_bits(gmm_f32_bits(b) ^ 0x80000000u));
            }
}
/* Loads four rows of column c, Hadamard-transformed in blocks of 16 if `hadamard`: 0, or gmm_format.hadamard, whose
   lower 16 bits are the signs by row of a block. */
GMM__DEVICE void gmm__quant_load_col(const float *x, int32_t c, int32_t hadamard, float v[4]) {
    const int32_t lane = gmm__lane(), quarter = lane & 3;
    int32_t j, stride;
#pragma unroll
    for (j = 0; j < 4; j++) v[j] = x[gmm__quant_smem_index(4 * lane + j, c)];
    if (!hadamard) return;
#pragma unroll
    for (j = 0; j < 4; j++)
        v[j] = gmm_f32_from_bits(gmm_f32_bits(v[j]) ^ (((uint32_t)hadamard >> (4 * quarter + j)) & 1u) << 31);
    gmm_hadamard_stages(v, 4, 2);
#pragma unroll
    for (stride = 1; stride < 4; stride *= 2)
#pragma unroll
        for (j = 0; j < 4; j++) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, v[j], stride);
            v[j] = quarter & stride ? gmm__fadd(other, gmm_f32_from_bits(gmm_f32_bits(v[j]) ^ 0x80000000u))
                                    : gmm__fadd(v[j], other);
        }
#pragma unroll
    for (j = 0; j < 4; j++) v[j] = gmm_bf16_to_f32(gmm_f32_to_bf16(gmm__fmul(v[j], 0.25f)));
}
/* Loads four elements of line l of a copy. */
GMM__DEVICE void gmm__quant_load_line(const float *x, int32_t columnwise, int32_t l, int32_t hadamard, float v[4]) {
    if (columnwise) gmm__quant_load_col(x, l, hadamard, v);
    else gmm__quant_load_row(x, l, v);
}
GMM__DEVICE uint32_t gmm__quant_amax4(const float v[4]) {
    return gmm_amax_bits(gmm_amax_bits(gmm_amax_bits(gmm_amax_bits(0u, v[0]), v[1]), v[2]), v[3]);
}

/* Updates the lane's amax, and the row's unless `row_amax` is NULL, by four values. */
GMM__DEVICE uint32_t gmm__quant_row_amax(uint32_t amax, const float v[4], uint32_t *row_amax) {
    uint32_t bits = gmm__quant_amax4(v);
    amax = bits > amax ? bits : amax;
    if (!row_amax) return amax;
    bits = __reduce_max_sync(0xFFFFFFFFu, bits);
    if (gmm__lane() == 0) atomicMax(row_amax, bits);
    return amax;
}

/* E2M1 codes of four values, the first in the lowest bits. */
GMM__DEVICE uint32_t gmm__quant_e2m1x4(const float p[4]) {
    return (uint32_t)gmm_f32_to_e2m1(p[0]) | (uint32_t)gmm_f32_to_e2m1(p[1]) << 4 |
           (uint32_t)gmm_f32_to_e2m1(p[2]) << 8 | (uint32_t)gmm_f32_to_e2m1(p[3]) << 12;
}
/* Codes of four values times the encode scale of their block. */
GMM__DEVICE uint32_t gmm__quant_codes(gmm_dtype dtype, const float v[4], float encode_scale) {
    float products[4];
    int32_t j;
#pragma unroll
    for (j = 0; j < 4; j++) products[j] = gmm__fmul(v[j], encode_scale);
    return dtype == GMM_E2M1 ? gmm__quant_e2m1x4(products) : gmm_encode_fp8x4(dtype == GMM_E5M2, products);
}

/* Maximum over each aligned group of `lanes` adjacent lanes, a power of two; every lane receives it. */
GMM__DEVICE uint32_t gmm__quant_block_max(uint32_t v, int32_t lanes) {
    int32_t d;
    for (d = 1; d < lanes; d <<= 1) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, v, d);
        v = other > v ? other : v;
    }
    return v;
}

/* NV16 with four_over_six (gmm_nv_scale): the two candidate scales of a block, and the error of one of its lines with
   each, summed in the order of its elements. */
GMM__DEVICE void gmm__quant_four_over_six(const gmm_nv_global *n, const float v[4], float amax, int32_t squared,
                                          uint8_t scale[2], float error[2]) {
    const float base = gmm__fmul(gmm__fdiv(amax, 6.0f), n->scale);
    int32_t choice, j, src_lane;
    scale[0] = gmm_f32_to_e4m3(base);
    scale[1] = gmm_f32_to_e4m3(gmm__fmul(base, 1.5f));
#pragma unroll
    for (choice = 0; choice < 2; choice++) {
        const float encode_scale = gmm_nv_encode(n, scale[choice]), block_scale = gmm_e4m3_to_f32(scale[choice]);
        float e[4], sum = 0.0f;
#pragma unroll
        for (j = 0; j < 4; j++) {
            const float code = gmm_e2m1_to_f32(gmm_f32_to_e2m1(gmm__fmul(v[j], encode_scale)));
            const float decoded = gmm__fdiv(gmm__fmul(gmm__fmul(code, block_scale), n->amax), 6.0f * n->e4m3_max);
            const float difference = gmm__fadd(decoded, gmm_f32_from_bits(gmm_f32_bits(v[j]) ^ 0x80000000u));
            e[j] = squared ? gmm__fmul(difference, difference)
                           : gmm_f32_from_bits(gmm_f32_bits(difference) & 0x7FFFFFFFu);
        }
        for (src_lane = 0; src_lane < 4; src_lane++) {
            float partial = sum;
#pragma unroll
            for (j = 0; j < 4; j++) partial = gmm__fadd(partial, e[j]);
            sum = __shfl_sync(0xFFFFFFFFu, partial, (gmm__lane() & ~3) | src_lane);
        }
        error[choice] = sum;
    }
}

/* The part of one copy that belongs to one tile. */
typedef struct gmm__quant_copy_tile {
    gmm__qview view;
    int64_t line0, along0;         /* first line of the tile; first element along a line */
    int32_t lines, along;          /* lines with values; elements along a line that are stored */
    const float *amax;             /* of the unit or, if per_line, of line line0 and the following ones */
    int32_t per_line;
    float scale;
    int64_t group, first_block, blocks_per_line;
    gmm_nv_global global;          /* NV16 with one amax per unit */
    float encode_scale;            /* TENSOR: what elements are multiplied by */
    int64_t line_step, block_step; /* strides of scales between lines and between blocks, except for SWIZZLED */
    int64_t scale_lines;           /* with padding */
    int32_t blocks, padded_blocks; /* blocks of a line in the tile: with values, and with padding */
} gmm__quant_copy_tile;

/* Initializes what all lines of a copy's tile share. */
GMM__DEVICE void gmm__quant_copy_tile_begin(const gmm__quant_args *a, gmm_scaling scaling, gmm__quant_copy_tile *s) {
    const gmm_format *f = &a->format;
    const gmm__qview *v = &s->view;
    const int32_t width = gmm_block_along(scaling);
    s->blocks = s->padded_blocks = 0;
    s->line_step = s->block_step = s->scale_lines = 0;
    if (width) {
        const int64_t blocks = gmm__ceil_div(v->along, width), padded = gmm__round_up(blocks, 4);
        const int64_t first = s->along0 / width;
        s->blocks = (int32_t)(blocks - first < GMM_TILE_BLOCKS ? blocks - first : (int64_t)GMM_TILE_BLOCKS);
        s->padded_blocks = (int32_t)(padded - first < GMM_TILE_BLOCKS ? padded - first : (int64_t)GMM_TILE_BLOCKS);
        s->line_step = gmm__qview_scale(v, 1, 0); /* 0 for blocks of 128 x 128 */
        s->block_step = gmm__qview_scale(v, 0, 1);
        s->scale_lines = width == 128 ? gmm__round_up(v->lines, 4) : gmm__round_up(v->lines, 128);
    }
    s->encode_scale = 1.0f;
    if (scaling == GMM_SCALING_NV16)
        s->global = gmm_nv_global_of(s->per_line ? 0.0f : s->amax[0], f->e4m3_256 ? 256.0f : 448.0f);
    else if (scaling == GMM_SCALING_TENSOR)
        s->encode_scale = f->delayed ? s->scale : gmm__quant_scale(a, gmm_dtype_largest(f->dtype), 0, s->amax[0]);
}

/* Computes and stores the scale and codes of a lane's four values of line l. `shared_amax`: amaxes of square blocks.
   Codes of copies in the order of the source go to `codes` first. */
GMM__DEVICE void gmm__quant_line(const gmm__quant_args *a, const gmm__quant_copy_tile *s, int32_t l, const float v[4],
                                 const uint32_t *shared_amax, uint8_t *codes) {
    const gmm_format *f = &a->format;
    const gmm_scaling scaling = f->scaling;
    const gmm__qview *view = &s->view;
    const int32_t lane = gmm__lane(), width = gmm_block_along(scaling), lanes = width ? width / 4 : 32;
    const int32_t block = lane / lanes, valid = l < s->lines, is_first_lane = lane % lanes == 0;
    const int32_t height = scaling == GMM_SCALING_128X128 ? GMM_TILE : f->square ? width : 1;
    const int64_t line = s->line0 + l;
    const int32_t count = s->along - 4 * lane;
    uint32_t stored = 0, code;
    float encode_scale = s->encode_scale, amax = 0.0f;
    int32_t i;
    if (width) {
        uint32_t bits = gmm__quant_block_max(gmm__quant_amax4(v), lanes);
        if (height > 1) bits = shared_amax[l / height * GMM_TILE_BLOCKS + block];
        amax = gmm_f32_from_bits(bits);
    } else if (scaling == GMM_SCALING_ROW && valid) amax = s->amax[l];
    if (scaling == GMM_SCALING_NV16) {
        gmm_nv_global global = s->global;
        if (s->per_line) global = gmm_nv_global_of(valid ? s->amax[l] : 0.0f, global.e4m3_max);
        if (f->four_over_six && height > 1)
            stored = shared_amax[GMM__QUANT_SQUARES + l / height * GMM_TILE_BLOCKS + block];
        else if (f->four_over_six) {
            uint8_t scale[2];
            float error[2];
            gmm__quant_four_over_six(&global, v, amax, f->four_over_six == 2, scale, error);
            stored = scale[error[1] < error[0]];
        } else stored = gmm_nv_scale(&global, amax);
        encode_scale = gmm_nv_encode(&global, (uint8_t)stored);
    } else if (scaling == GMM_SCALING_MX32) {
        stored = gmm_mx_scale(amax, f->dtype);
        encode_scale = gmm_e8m0_reciprocal((uint8_t)stored);
    } else if (scaling != GMM_SCALING_TENSOR) {
        encode_scale = gmm__quant_scale(a, gmm_dtype_largest(f->dtype), width, amax);
        stored = gmm_f32_bits(gmm_scale_inverse(encode_scale));
    }
    if (scaling == GMM_SCALING_128X128) {
        const int64_t first = gmm__qview_scale(view, line, s->along0 / 128);
        /* a line's padding follows its last block */
        if (l == 0 && (lane == 0 || (s->blocks == 1 && lane < s->padded_blocks)))
            ((float *)(void *)view->scale)[first + lane] = lane == 0 ? gmm_f32_from_bits(stored) : 0.0f;
    } else if (scaling == GMM_SCALING_1X128) {
        if (is_first_lane && line < s->scale_lines)
            ((uint32_t *)(void *)view->scale)[line + s->along0 / 128 * s->block_step] = valid ? stored : 0u;
    } else if (width) {
        if (is_first_lane && block < s->padded_blocks) {
            const int64_t j = s->along0 / width + block;
            view->scale[view->order == GMM_SCALES_SWIZZLED ? gmm__qview_scale(view, line, j)
                                                           : line * s->line_step + j * s->block_step] =
                valid && block < s->blocks ? (uint8_t)stored : (uint8_t)0;
        }
    } else if (scaling == GMM_SCALING_ROW && view->direction == GMM_ROWWISE && lane == 0 && s->along0 == 0 && valid)
        ((float *)(void *)view->scale)[line] = gmm_f32_from_bits(stored);
    if (!valid) return;
    if (f->stochastic) {
        uint32_t random[4], word = 0;
        gmm_draw_block(a->random[0], a->random[1], s->group, s->first_block + l * s->blocks_per_line + block,
                       view->direction, random);
#pragma unroll
        for (i = 0; i < 4; i++) word = (lane & 3) == i ? random[i] : word;
        code = 0;
#pragma unroll
        for (i = 0; i < 4; i++)
            code |= (uint32_t)gmm_f32_to_e2m1_random(gmm__fmul(v[i], encode_scale), (word >> 8 * i) & 0xFFu) << 4 * i;
    } else code = gmm__quant_codes(f->dtype, v, encode_scale);
    if (view->mn_major) {
#pragma unroll
        for (i = 0; i < 4; i++)
            codes[(4 * lane + i) * GMM__QUANT_CODES_PITCH + l] =
                f->dtype == GMM_E2M1 ? (uint8_t)((code >> 4 * i) & 15u) : (uint8_t)(code >> 8 * i);
    } else if (f->dtype == GMM_E2M1) {
        uint8_t *dst = view->data + (line * view->ld + s->along0) / 2 + 2 * lane;
        if (count >= 4 && !((uintptr_t)dst & 1)) *(uint16_t *)dst = (uint16_t)code;
        else {
            if (count > 0) dst[0] = (uint8_t)code;
            if (count > 2) dst[1] = (uint8_t)(code >> 8);
        }
    } else {
        uint8_t *dst = view->data + line * view->ld + s->along0 + 4 * lane;
        if (count >= 4 && !((uintptr_t)dst & 3)) *(uint32_t *)dst = code;
        else
#pragma unroll
            for (i = 0; i < 4; i++)
                if (i < count) dst[i] = (uint8_t)(code >> 8 * i);
    }
}

/* Quantizes all lines of one copy of a tile whose values are in x. All threads of the CTA call it. */
GMM__DEVICE void gmm__quant_copy_tile_lines(const gmm__quant_args *a, gmm__quant_copy_tile *s, const float *x,
                                            uint32_t *shared_amax, uint8_t *codes) {
    const gmm_format *f = &a->format;
    const gmm_scaling scaling = f->scaling;
    const int32_t columnwise = s->view.direction == GMM_COLUMNWISE, hadamard = columnwise ? f->hadamard : 0;
    const int32_t width = gmm_block_along(scaling), lane = gmm__lane();
    const int32_t height = scaling == GMM_SCALING_128X128 ? GMM_TILE : f->square ? width : 1;
    int32_t l, i;
    gmm__quant_copy_tile_begin(a, scaling, s);
    if (height > 1) {
        for (i = (int32_t)threadIdx.x; i < GMM__QUANT_SQUARES; i += GMM__QUANT_THREADS) shared_amax[i] = 0;
        __syncthreads();
        for (l = gmm__warp(); l < s->lines; l += GMM__QUANT_WARPS) {
            uint32_t bits;
            float v[4];
            gmm__quant_load_line(x, columnwise, l, hadamard, v);
            bits = gmm__quant_block_max(gmm__quant_amax4(v), width / 4);
            if (lane % (width / 4) == 0)
                atomicMax(&shared_amax[l / height * GMM_TILE_BLOCKS + lane / (width / 4)], bits);
        }
        __syncthreads();
    }
    /* the errors of the 16 lines of a square block are summed as a binary tree, whose order fixes the result */
    if (height > 1 && scaling == GMM_SCALING_NV16 && f->four_over_six) {
        float *errors = (float *)(void *)codes; /* [2][GMM_TILE][GMM_TILE_BLOCKS] */
        for (l = gmm__warp(); l < GMM_TILE; l += GMM__QUANT_WARPS) {
            uint8_t scale[2];
            float v[4], error[2];
            gmm__quant_load_line(x, columnwise, l, hadamard, v);
            gmm__quant_four_over_six(&s->global, v, gmm_f32_from_bits(shared_amax[l / 16 * GMM_TILE_BLOCKS + lane / 4]),
                                     f->four_over_six == 2, scale, error);
            for (i = 0; i < 2; i++)
                if (lane % 4 == 0) errors[(i * GMM_TILE + l) * GMM_TILE_BLOCKS + lane / 4] = error[i];
            if (lane % 4 == 0 && l % 16 == 0)
                shared_amax[GMM__QUANT_SQUARES + l / 16 * GMM_TILE_BLOCKS + lane / 4] =
                    (uint32_t)scale[0] | (uint32_t)scale[1] << 8;
        }
        __syncthreads();
        for (i = (int32_t)threadIdx.x; i < GMM__QUANT_SQUARES; i += GMM__QUANT_THREADS) {
            uint32_t *chosen = &shared_amax[GMM__QUANT_SQUARES + i];
            float *row[2];
            int32_t stride, j;
            row[0] = errors + i / GMM_TILE_BLOCKS * 16 * GMM_TILE_BLOCKS + i % GMM_TILE_BLOCKS;
            row[1] = row[0] + GMM_TILE * GMM_TILE_BLOCKS;
            for (stride = 8; stride > 0; stride /= 2)
                for (j = 0; j < stride; j++) {
                    row[0][j * GMM_TILE_BLOCKS] = gmm__fadd(row[0][j * GMM_TILE_BLOCKS],
                                                            row[0][(j + stride) * GMM_TILE_BLOCKS]);
                    row[1][j * GMM_TILE_BLOCKS] = gmm__fadd(row[1][j * GMM_TILE_BLOCKS],
                                                            row[1][(j + stride) * GMM_TILE_BLOCKS]);
                }
            *chosen = row[1][0] < row[0][0] ? *chosen >> 8 : *chosen & 0xFFu;
        }
        __syncthreads();
    }
    for (l = gmm__warp(); l < GMM_TILE; l += GMM__QUANT_WARPS) {
        float v[4];
        gmm__quant_load_line(x, columnwise, l, hadamard, v);
        gmm__quant_line(a, s, l, v, shared_amax, codes);
    }
    if (!s->view.mn_major) return;
    __syncthreads();
    for (l = gmm__warp(); l < s->along; l += GMM__QUANT_WARPS) { /* stores the codes row by row */
        const uint8_t *src = codes + l * GMM__QUANT_CODES_PITCH;
        uint8_t *dst = s->view.data;
        if (f->dtype == GMM_E2M1) {
            dst += ((s->along0 + l) * s->view.ld + s->line0) / 2;
            for (i = 2 * lane; i < s->lines; i += 64) dst[i / 2] = (uint8_t)(src[i] | src[i + 1] << 4);
        } else {
            dst += (s->along0 + l) * s->view.ld + s->line0;
            if (4 * lane + 4 <= s->lines && !((uintptr_t)dst & 3))
                *(uint32_t *)(dst + 4 * lane) = *(const uint32_t *)(src + 4 * lane);
            else
                for (i = 4 * lane; i < 4 * lane + 4 && i < s->lines; i++) dst[i] = src[i];
        }
    }
}

/* Stores what depends on amaxes alone: amaxes for the caller, scales of tensors and of columns. Called by threads
   `first`, first + step, ... of a sequence. `store_amax`: amaxes that the caller gave replace those that the casts
   read. */
GMM__DEVICE void gmm__quant_scales(const gmm__quant_args *a, int64_t first, int64_t step, int32_t store_amax) {
    const gmm_format *f = &a->format;
    const int32_t tensor = f->scaling == GMM_SCALING_TENSOR;
    const int32_t global = tensor || (f->scaling == GMM_SCALING_NV16 && !f->row_amax);
    int64_t i;
    int32_t k;
    for (i = first; i < a->units && global; i += step) {
        const gmm_mat *copy[2] = { &a->rowwise, &a->columnwise };
        float amax[2] = { 0.0f, 0.0f };
        if (a->amax[0]) {
            amax[0] = a->amax[0][i];
            amax[1] = f->hadamard ? a->amax[1][i] : amax[0];
        }
        for (k = 0; k < 2; k++) {
            if (copy[k]->dtype == GMM_NONE) continue;
            if (a->phase == GMM_QUANT_CAST) amax[k] = copy[k]->amax[i];
            else if (copy[k]->amax && !a->record) {
                if (f->delayed)
                    copy[k]->amax[i] = gmm_f32_from_bits(gmm_amax_bits(gmm_f32_bits(amax[k]), copy[k]->amax[i]));
                else copy[k]->amax[i] = amax[k];
            }
        }
        if (a->phase == GMM_QUANT_CAST && tensor && copy[0]->dtype != GMM_NONE) amax[1] = amax[0];
        if (store_amax) {
            a->amax[0][i] = amax[0];
            a->amax[1][i] = amax[1];
        }
        for (k = 0; k < 2 && tensor && a->phase != GMM_QUANT_AMAX; k++) {
            const float scale = f->delayed ? a->scale ? a->scale[i] : 1.0f
                                           : gmm__quant_scale(a, gmm_dtype_largest(f->dtype), 0, amax[k]);
            gmm__qview v;
            if (copy[k]->dtype == GMM_NONE) continue;
            v = gmm__qview_of(copy[k], k ? GMM_COLUMNWISE : GMM_ROWWISE, a->grouped, i, 0, 0, 0, 1);
            *(float *)(void *)v.scale = gmm_scale_inverse(scale);
        }
    }
    for (i = first; a->col_amax && i < a->units * a->cols; i += step) {
        const gmm__qview v = gmm__qview_of(&a->columnwise, GMM_COLUMNWISE, a->grouped, i / a->cols, 0, 0, 0, a->cols);
        ((float *)(void *)v.scale)[i % a->cols] =
            gmm_scale_inverse(gmm__quant_scale(a, gmm_dtype_largest(f->dtype), 0, a->col_amax[i]));
    }
    if (f->row_amax && a->rowwise.dtype != GMM_NONE)
        for (i = first; i < (a->grouped ? a->offsets[a->units] : a->units * a->rows); i += step)
            a->rowwise.amax[i] = a->row_amax[i];
}
#if GMM__HOLDS(0) && !defined(GMM_NO_QUANT)
/* gmm__quant_scales by a kernel of its own, for the general casts. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_quantize_scales(const __grid_constant__ gmm__quant_args a) {
    if (gmm__quant_wait_skips(a.skip)) return;
    gmm__quant_scales(&a, (int64_t)blockIdx.x * GMM__QUANT_THREADS + threadIdx.x,
                      (int64_t)gridDim.x * GMM__QUANT_THREADS, 1);
}

/* Zeroes the rows behind the last group. One CTA per row. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_quantize_tail(const __grid_constant__ gmm__quant_tail_args a) {
    int64_t r, i;
    if (gmm__quant_wait_skips(a.skip)) return;
    for (r = *a.valid_rows + blockIdx.x; r < a.rows; r += gridDim.x)
        for (i = threadIdx.x; i < a.bytes; i += GMM__QUANT_THREADS) a.data[r * a.pitch + i] = 0;
}
#endif

