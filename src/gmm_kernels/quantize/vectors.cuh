/* --- vectorized casts: the common shapes and alignments, at the speed of memory --- */

/* A CTA of 8 warps processes tiles of 128 x 128 elements; a lane holds 8 x 8 of them in registers, in memory
   format (words.cuh), so that rows and columns are encoded from one load:

       columns   0       64      128       columns   0   8   16  24  32  40  48  56
       rows  0   +-------+-------+         rows  0   lane 0   1   2   3   4   5   6   7
                 | warp 0| warp 4|               8        8   9  10  11  12  13  14  15
            32   +-------+-------+              16       16  17  18  19  20  21  22  23
                 | warp 1| warp 5|              24       24  25  26  27  28  29  30  31
            64   +-------+-------+
                 | warp 2| warp 6|         A block of 16 elements of a row or a column lies in two lanes, one of
            96   +-------+-------+         128 of a row in 8 lanes of two warps, of a column in 4 lanes of four
                 | warp 3| warp 7|         warps.
           128   +-------+-------+

   Rowwise codes are stored from registers, 8 per lane and row; columnwise codes are transposed in shared memory.
   MX32, whose copies are both stored in the order of the source, has a tile of its own (stages_mx32.cuh). */
enum {
    GMM_CAST_WARP_ROWS = 32, GMM_CAST_WARP_COLS = 64,
    /* bytes of a column of FP8 codes in shared memory; 16 bytes of padding follow every eight columns */
    GMM_CAST_FP8_COLUMN = GMM_TILE,
    GMM_CAST_FP8_CODES = GMM_TILE * GMM_CAST_FP8_COLUMN + GMM_TILE / 8 * 16,
    GMM_CAST_NV16_COLUMN = GMM_TILE / 2, /* the same for E2M1 codes */
    GMM_CAST_NV16_CODES = GMM_TILE * GMM_CAST_NV16_COLUMN + GMM_TILE / 8 * 16,
    /* tiles of a strip that a CTA processes (NV16, and MX32 from 16-bit sources) */
    GMM_CAST_TILES = 2
};

/* Number of strips of a call, and the split if warps compute it. All threads call it. */
GMM__DEVICE gmm_warp_split gmm_cast_split(const gmm__quant_args *a) {
    gmm_warp_split w = { 0, 0, 0, 0 };
    if (a->warp_split) return gmm_warp_split_scan(&a->groups, GMM_TILE, threadIdx.x < 32 && blockIdx.x == 0 &&
                                                  blockIdx.y == 0);
    w.total = (int32_t)gmm__quant_strips(a->grouped, a->tiles, a->units, a->rows);
    return w;
}

/* gmm__quant_strip in 32 bits. */
typedef struct gmm_cast_strip { int32_t unit, row, m, rows, source_row, padded_row; } gmm_cast_strip;

/* Strip number `strip`, in the order of addresses. */
GMM__DEVICE gmm_cast_strip gmm_cast_strip_of(const gmm__quant_args *a, const gmm_warp_split *w, int32_t strip) {
    if (a->warp_split) {
        const int32_t g = __popc(__ballot_sync(0xFFFFFFFFu, w->tiles <= strip));
        const int32_t group_first = w->tiles - (w->rows + GMM_TILE - 1) / GMM_TILE;
        const int32_t first = __shfl_sync(0xFFFFFFFFu, group_first, g), rows = __shfl_sync(0xFFFFFFFFu, w->rows, g);
        const int32_t begin = __shfl_sync(0xFFFFFFFFu, w->begin, g), row = (strip - first) * GMM_TILE;
        const gmm_cast_strip p = { g, row, min(rows - row, (int32_t)GMM_TILE), rows, begin, first * GMM_TILE };
        return p;
    } else {
        const gmm__quant_strip s = gmm__quant_strip_of(a->grouped, a->tiles, a->offsets, a->units, a->rows, strip);
        const gmm_cast_strip p = { (int32_t)s.unit, (int32_t)s.row, (int32_t)s.m, (int32_t)s.rows,
                                   (int32_t)s.source_row, (int32_t)s.padded_row };
        return p;
    }
}

/* A tile of a vectorized cast, and what of it belongs to this lane. */
typedef struct gmm_cast_tile {
    const gmm__quant_args *a;
    gmm_dtype source;    /* dtype of the source: a constant of the kernel's instance */
    int32_t rowwise, columnwise; /* the copies that the call has */
    gmm_cast_strip p;    /* the strip of rows that the tile is part of */
    int32_t c0, cols;    /* first column of the tile; columns of the matrix */
    int32_t end;         /* the column behind the last one that the tile may have */
    int32_t row0, col0;  /* in the tile: first row and first column of the lane */
    int32_t in_cols;     /* whether the lane's columns exist */
    int32_t valid_rows;  /* rows from row0 on that exist; below 1 or above 8 where none or more than the lane's do */
    int32_t padded_rows; /* rows of the unit as its scales count them */
} gmm_cast_tile;

/* What all tiles of a lane have in common. */
GMM__DEVICE gmm_cast_tile gmm_cast_tile_init(const gmm__quant_args *a, gmm_dtype source) {
    const int32_t lane = gmm__lane(), warp = gmm__warp();
    gmm_cast_tile t;
    t.a = a;
    t.source = source;
    t.row0 = warp % 4 * GMM_CAST_WARP_ROWS + 8 * (lane >> 3);
    t.col0 = warp / 4 * GMM_CAST_WARP_COLS + 8 * (lane & 7);
    t.rowwise = a->rowwise.dtype != GMM_NONE;
    t.columnwise = a->columnwise.dtype != GMM_NONE;
    return t;
}
/* Moves to the tile that begins at column c0. */
GMM__DEVICE void gmm_cast_tile_at(gmm_cast_tile *t, int32_t c0) {
    t->c0 = c0;
    t->in_cols = t->col0 < t->end - c0;
}
/* Moves to the first of the `cta_tiles` tiles that the CTA processes of strip number `index` of its sequence. */
GMM__DEVICE void gmm_cast_tile_move(gmm_cast_tile *t, const gmm_warp_split *w, int32_t index, int32_t cta_tiles) {
    const gmm__quant_args *a = t->a;
    const int32_t tile = a->backward ? (int32_t)(gridDim.x - 1u - blockIdx.x) : (int32_t)blockIdx.x;
    t->cols = t->end = (int32_t)a->cols;
    gmm_cast_tile_at(t, tile * cta_tiles * GMM_TILE);
    t->p = gmm_cast_strip_of(a, w, a->backward ? w->total - 1 - index : index);
    t->valid_rows = t->p.m - t->row0;
    t->padded_rows = a->grouped ? (t->p.rows + 127) & ~127 : t->p.rows;
}

/* --- addresses --- */

GMM__DEVICE uint8_t *gmm_cast_data(const gmm_mat *m, int64_t step, int64_t unit) {
    return m->table ? (uint8_t *)m->table[unit] : (uint8_t *)m->data + unit * step;
}
/* The one address of scales: those of a strip's unit in the rowwise (copy 0) or columnwise copy (copy 1). `offset`:
   bytes of scales of the padded rows before a group (gmm_scale_base). */
GMM__DEVICE uint8_t *gmm_cast_scales(const gmm_cast_tile *t, int32_t copy, int64_t offset) {
    const gmm_mat *m = copy ? &t->a->columnwise : &t->a->rowwise;
    uint8_t *const scales = m->scale_table ? (uint8_t *)m->scale_table[t->p.unit]
                                     : (uint8_t *)m->scale + t->p.unit * t->a->scale_step[copy];
    return scales + (t->a->grouped ? offset : 0);
}
/* Stores four scale bytes of line l of a tile, the first of block `tile_block` of the tile. `dst`: scales of the unit,
   where the tile starts with line `line` and block `block` and a line has `along` scales. */
GMM__DEVICE void gmm_cast_store_scales4(uint8_t *dst, gmm_scale_order order, int32_t line, int32_t block, int32_t along,
                                        int32_t l, int32_t tile_block, uint32_t scales4) {
    if (order == GMM_SCALES_SWIZZLED)
        dst += (int64_t)line * along + block * 128 + tile_block * 128 + (l & 31) * 16 + (l >> 5) * 4;
    else dst += (int64_t)line * along + block + (l * along + tile_block);
    if (block + tile_block < along) gmm_st_global_b32(dst, scales4);
}

/* --- load --- */

/* Loads `words` words of a row to x; zeros unless it exists. */
GMM__DEVICE void gmm_cast_load_row(const uint8_t *src, int32_t exists, int32_t words, uint32_t *x) {
    int32_t k;
#pragma unroll
    for (k = 0; k < words; k += 4) {
        uint4 v = make_uint4(0u, 0u, 0u, 0u);
        if (exists) v = __ldg((const uint4 *)(const void *)(src + 4 * k));
        x[k] = v.x;
        x[k + 1] = v.y;
        x[k + 2] = v.z;
        x[k + 3] = v.w;
    }
}
/* Loads gathered rows. A lane looks up one of the warp's 32 rows, and the others get it from there. */
GMM__DEVICE void gmm_cast_gather_rows(const gmm_cast_tile *t, int32_t rows, int32_t words, int32_t stride,
                                      uint32_t *x) {
    const gmm__quant_args *a = t->a;
    const int64_t size = gmm__words8(t->source) / 2;
    const uint8_t *src = gmm_cast_data(&a->src, 0, 0) + (t->c0 + t->col0) * size;
    const int32_t line = (t->row0 & ~31) + gmm__lane();
    const int32_t own = line < t->p.m ? gmm_checked_row(&a->index, t->p.source_row + t->p.row + line) : -1;
    int32_t i;
#pragma unroll
    for (i = 0; i < rows; i++) {
        const int32_t row = __shfl_sync(0xFFFFFFFFu, own, (t->row0 & 31) + i);
        gmm_cast_load_row(src + row * a->src.ld * size, t->in_cols && row >= 0, words, x + i * stride);
    }
}
/* Loads the lane's rows, `words` words of each to x[stride i]; zeros beyond the last row or column. `ahead`: a
   constant. With 1 rows that are not gathered are loaded without a branch, so that ptxas can issue these loads early;
   but FP8 kernels spill a register with it. */
GMM__DEVICE void gmm_cast_load_rows(const gmm_cast_tile *t, const int ahead, int32_t rows, int32_t words,
                                    int32_t stride, uint32_t *x) {
    const gmm__quant_args *a = t->a;
    const int64_t size = gmm__words8(t->source) / 2, pitch = a->src.ld * size;
    const uint8_t *src = gmm_cast_data(&a->src, a->step[2], t->p.unit) +
                         (t->p.source_row + t->p.row + t->row0) * pitch + (t->c0 + t->col0) * size;
    const int gathers = a->index.at != NULL;
    const int32_t valid_rows = t->in_cols && !(ahead && gathers) ? t->valid_rows : 0;
    int32_t i;
    if (!ahead && gathers) {
        gmm_cast_gather_rows(t, rows, words, stride, x);
        return;
    }
#pragma unroll
    for (i = 0; i < rows; i++, src += pitch) gmm_cast_load_row(src, i < valid_rows, words, x + i * stride);
    if (ahead && gathers) gmm_cast_gather_rows(t, rows, words, stride, x);
}
GMM__DEVICE void gmm_cast_load(const gmm_cast_tile *t, const int ahead, uint32_t x[8][8]) {
    gmm_cast_load_rows(t, ahead, 8, gmm__words8(t->source), 8, x[0]);
}
/* Values of the lane's row or column number l. */
GMM__DEVICE void gmm_cast_line(gmm_dtype source, const uint32_t x[8][8], int32_t columnwise, int32_t l, float v[8]) {
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) v[i] = gmm__word_value(source, x[columnwise ? i : l], columnwise ? l : i);
}
/* Reads one element of the lane's part again from device memory, for codecs that NaN or saturation need. */
GMM__DEVICE float gmm_cast_reload(const gmm_cast_tile *t, int32_t i, int32_t j) {
    const gmm__quant_args *a = t->a;
    int64_t row = t->p.source_row + t->p.row + (t->row0 + i);
    if (a->index.at && (row = gmm_indexed_row(&a->index, row)) < 0) return 0.0f;
    return gmm_load(t->source, gmm_cast_data(&a->src, a->step[2], t->p.unit), row * a->src.ld + (t->c0 + t->col0 + j));
}

/* --- amax --- */

/* Maxima of the lane's parts of its columns, as words. */
GMM__DEVICE void gmm_cast_col_maxima(gmm_dtype source, const uint32_t x[8][8], uint32_t col[8]) {
    int32_t i, k;
#pragma unroll
    for (k = 0; k < gmm__words8(source); k++) {
        col[k] = 0;
#pragma unroll
        for (i = 0; i < 8; i++) col[k] = gmm__word_max(source, col[k], x[i][k]);
    }
}
/* Maxima of the lane's parts of its rows, as bits of fp32. with_cols: and of its columns, from absolute values that are
   computed once. */
GMM__DEVICE void gmm_cast_row_maxima(gmm_dtype source, const uint32_t x[8][8], uint32_t row[8], int32_t with_cols,
                                     uint32_t col[8]) {
    int32_t i, k;
#pragma unroll
    for (k = 0; k < gmm__words8(source) && with_cols; k++) col[k] = 0;
#pragma unroll
    for (i = 0; i < 8; i++) {
        row[i] = 0;
#pragma unroll
        for (k = 0; k < gmm__words8(source); k++) {
            row[i] = gmm__word_max(source, row[i], x[i][k]);
            if (with_cols) col[k] = gmm__word_max(source, col[k], x[i][k]);
        }
        row[i] = gmm__word_fold(source, row[i]);
    }
}
/* Maxima of columns over the four lanes above one another, that is over the warp's 32 rows. */
GMM__DEVICE void gmm_cast_reduce_cols(gmm_dtype source, uint32_t col[8]) {
    int32_t i, k;
#pragma unroll
    for (k = 0; k < gmm__words8(source); k++)
#pragma unroll
        for (i = 8; i < 32; i <<= 1)
            col[k] = gmm__word_max(source, col[k], __shfl_xor_sync(0xFFFFFFFFu, col[k], i));
}
/* Maximum of the warp's part of a tile, as bits of an fp32. */
GMM__DEVICE uint32_t gmm_cast_warp_max(gmm_dtype source, const uint32_t x[8][8]) {
    uint32_t maximum = 0;
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++)
#pragma unroll
        for (k = 0; k < gmm__words8(source); k++) maximum = gmm__word_max(source, maximum, x[i][k]);
    return __reduce_max_sync(0xFFFFFFFFu, gmm__word_fold(source, maximum));
}
/* Raises an amax in device memory; it is read first, since most values do not raise it. */
GMM__DEVICE void gmm_cast_raise_amax(uint32_t *dst, uint32_t bits) {
    if (bits > *(volatile uint32_t *)dst) atomicMax(dst, bits);
}

/* --- column sums --- */

/* A strip's partial sums for a bias gradient, in the order that bgrad.cuh states. Warps leave the sums of their 32 rows
   in shared memory, float [GMM_CAST_SUM_PARTS][pitch]: part i has rows 32 i to 32 i + 31, and pitch is the number of
   columns of the tile. */
enum { GMM_CAST_SUM_PARTS = GMM_TILE / GMM_CAST_WARP_ROWS };

/* Writes the warp's part. A lane has `rows` rows, 8 or 16, of `cols` elements at x[stride i]: these are constants. */
GMM__DEVICE void gmm_cast_column_sums(const gmm_cast_tile *t, int32_t rows, int32_t cols, int32_t stride,
                                      const uint32_t *x, int32_t pitch, float *smem) {
    const float *scale = t->a->sum_scale;
    float sum[8];
    int32_t i, j, k;
    if (scale) scale += t->p.source_row + t->p.row + t->row0;
#pragma unroll
    for (k = 0; k < rows; k += 8) {
        float sum8[8] = { 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
        for (i = k; i < k + 8; i++) {
            const float s = scale && i < t->valid_rows ? scale[i] : 1.0f;
#pragma unroll
            for (j = 0; j < cols; j++) sum8[j] = __fmaf_rn(s, gmm__word_value(t->source, x + stride * i, j), sum8[j]);
        }
#pragma unroll
        for (j = 0; j < cols; j++) sum[j] = k ? __fadd_rn(sum[j], sum8[j]) : sum8[j];
    }
#pragma unroll
    for (i = rows; i < 32; i *= 2) /* the 32 / rows lanes above one another are 8 or 16 lanes apart */
#pragma unroll
        for (j = 0; j < cols; j++) sum[j] = __fadd_rn(sum[j], __shfl_xor_sync(0xFFFFFFFFu, sum[j], i));
    if ((t->row0 & (GMM_CAST_WARP_ROWS - 1)) == 0)
#pragma unroll
        for (j = 0; j < cols; j++) smem[t->row0 / GMM_CAST_WARP_ROWS * pitch + t->col0 + j] = sum[j];
}
/* Adds up the parts and stores the strip's partial sums. All threads call it after a barrier. */
GMM__DEVICE void gmm_cast_store_sums(const gmm_cast_tile *t, int32_t pitch, const float *smem) {
    const int64_t strip = (t->p.padded_row + t->p.row) / GMM_TILE;
    int32_t col;
    for (col = (int32_t)threadIdx.x; col < min(pitch, t->end - t->c0); col += GMM__QUANT_THREADS)
        t->a->sums[strip * t->cols + t->c0 + col] =
            __fadd_rn(__fadd_rn(smem[col], smem[pitch + col]), __fadd_rn(smem[2 * pitch + col], smem[3 * pitch + col]));
}

/* --- encode --- */

/* Where a column begins in codes that are transposed in shared memory, `bytes` per column. */
GMM__DEVICE int32_t gmm_cast_smem_column(int32_t bytes, int32_t col) { return col * bytes + (col >> 3) * 16; }
/* A tile's columns are stored from shared memory in steps of 16 bytes per thread. Where the thread's first ones go.
   bytes, pitch: bytes of a column in shared memory, and from one column to the next in device memory. */
GMM__DEVICE uint8_t *gmm_cast_col_codes(const gmm_cast_tile *t, int32_t thread, int32_t bytes, int64_t pitch) {
    const gmm__quant_args *a = t->a;
    const int32_t chunks = bytes / 16, elements = GMM_TILE / bytes; /* elements per byte */
    const int64_t begin = (a->grouped ? t->p.padded_row : 0) + t->p.row;
    return gmm_cast_data(&a->columnwise, a->step[1], t->p.unit) + begin / elements +
           (t->c0 + thread / chunks) * pitch + thread % chunks * 16;
}
/* Stores the columns from there on. All threads call it after a barrier. */
GMM__DEVICE void gmm_cast_store_cols(const gmm_cast_tile *t, int32_t thread, int32_t bytes, uint8_t *codes,
                                     uint8_t *dst, int64_t pitch) {
    const int32_t chunks = bytes / 16, elements = GMM_TILE / bytes, step = GMM__QUANT_THREADS / chunks;
    int32_t k;
    if (thread % chunks * 16 * elements < (t->a->grouped ? (int32_t)GMM_TILE : t->p.m))
#pragma unroll
        for (k = thread / chunks; k < GMM_TILE; k += step, dst += step * pitch)
            if (k < t->end - t->c0)
                gmm_st_global_v4_b32(dst, *(const uint4 *)(const void *)(codes + gmm_cast_smem_column(bytes, k) +
                                                                         thread % chunks * 16));
}
