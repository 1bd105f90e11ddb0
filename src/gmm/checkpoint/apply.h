/* ............................................................................................... 15.10 Applying ... */
/* Applies the moves of a plan to memory or through callbacks. */

static float gmm__ck_load_float(gmm_dtype dtype, const char *src) { /* any alignment */
    uint32_t bits = 0;
    memcpy(&bits, src, dtype == GMM_F32 ? 4 : 2);
    return dtype == GMM_F32 ? gmm_f32_from_bits(bits) : dtype == GMM_BF16 ? gmm_bf16_to_f32((uint16_t)bits)
                                                                       : gmm_f16_to_f32((uint16_t)bits);
}

static void gmm__ck_store_float(gmm_dtype dtype, char *dst, float value) {
    const uint32_t w = gmm_f32_bits(value);
    const uint16_t h = dtype == GMM_BF16 ? gmm_f32_to_bf16(value) : gmm_f32_to_f16(value);
    if (dtype == GMM_F32) memcpy(dst, &w, 4);
    else memcpy(dst, &h, 2);
}

/* One tile of a move. Strides and steps count elements. */
typedef struct gmm__ck_tile_args {
    const gmm_ckpt_move *move;
    gmm_dtype src_dtype, dst_dtype;
    int64_t src_unit, dst_unit;                   /* bytes of an element */
    int64_t count[GMM_CKPT_LOOPS], dst_step[GMM_CKPT_LOOPS];
    const char *src;                              /* address of element src_base */
    char *dst;                                    /* address of the first element */
    const char *scale;                            /* address of scale scale_base */
    int64_t src_base, scale_base;
    /* DEQUANT */
    int64_t rows, cols, scale_rows, scale_cols;   /* extents of a matrix and of its scales */
    int64_t block_rows, block_cols;               /* 0 = the whole extent */
    int64_t scale_unit;                           /* bytes of a scale */
    gmm_dtype scale_dtype;
    int32_t packed;                               /* 1: two codes per byte */
} gmm__ck_tile_args;

/* Value of element i of a quantized tensor. */
static float gmm__ck_dequant(const gmm__ck_tile_args *t, int64_t i) {
    const int64_t row = i / t->cols, col = i % t->cols;
    const int64_t matrix = row / t->rows, r = row % t->rows;
    const int64_t s = (matrix * t->scale_rows + (t->block_rows ? r / t->block_rows : 0)) * t->scale_cols +
                      (t->block_cols ? col / t->block_cols : 0) - t->scale_base;
    const float scale = t->scale_unit == 1 ? gmm_e8m0_to_f32((uint8_t)t->scale[s])
                                           : gmm__ck_load_float(t->scale_dtype, t->scale + s * t->scale_unit);
    if (t->packed) {
        const uint32_t byte = (uint8_t)t->src[i / 2 - t->src_base / 2]; /* two elements, the even one in the low half */
        return gmm_e2m1_to_f32((uint8_t)(i % 2 ? byte >> 4 : byte & 15u)) * scale;
    }
    return (t->src_dtype == GMM_E5M2 ? gmm_e5m2_to_f32 : gmm_e4m3_to_f32)((uint8_t)t->src[i - t->src_base]) * scale;
}

/* Moves n elements of an innermost loop, from source element `src` to destination element `dst`. */
static void gmm__ck_move_run(const gmm__ck_tile_args *t, int64_t src, int64_t dst, int64_t n, int64_t src_step,
                             int64_t dst_step) {
    const char *s = t->src + (src - t->src_base) * t->src_unit;
    char *d = t->dst + dst * t->dst_unit;
    int64_t i;
    switch (t->move->kind) {
    case GMM_CKPT_COPY:
        if (src_step == 1 && dst_step == 1) {
            memcpy(d, s, (size_t)(n * t->dst_unit));
            return;
        }
        switch (t->dst_unit) { /* constant sizes become single instructions */
        case 1: for (i = 0; i < n; i++) d[i * dst_step] = s[i * src_step]; return;
        case 2: for (i = 0; i < n; i++) memcpy(d + i * dst_step * 2, s + i * src_step * 2, 2); return;
        case 4: for (i = 0; i < n; i++) memcpy(d + i * dst_step * 4, s + i * src_step * 4, 4); return;
        default: for (i = 0; i < n; i++) memcpy(d + i * dst_step * 8, s + i * src_step * 8, 8); return;
        }
    case GMM_CKPT_CONVERT:
        for (i = 0; i < n; i++)
            gmm__ck_store_float(t->dst_dtype, d + i * dst_step * t->dst_unit,
                                gmm__ck_load_float(t->src_dtype, s + i * src_step * t->src_unit));
        return;
    default:
        for (i = 0; i < n; i++)
            gmm__ck_store_float(t->dst_dtype, d + i * dst_step * t->dst_unit, gmm__ck_dequant(t, src + i * src_step));
        return;
    }
}

/* Moves a tile, from source element `src` to the start of the destination. Where the source's step is smaller in the
   last loop but one than in the last, these two loops run in square tiles, so that both sides stay in the cache. */
static void gmm__ck_move_tile(const gmm__ck_tile_args *t, int64_t src) {
    enum { TILE = 32 };
    const gmm_ckpt_move *m = t->move;
    const int n = m->loops, y = n - 2, x = n - 1;
    const int transposed = n > 1 && m->src_step[n - 1] > m->src_step[n > 1 ? n - 2 : 0];
    const int outer = n - (transposed ? 2 : 1);
    const int gather = transposed && m->kind == GMM_CKPT_COPY && m->src_step[y < 0 ? 0 : y] == 1;
    char square[TILE * (TILE + 8) * 8];
    gmm__ck_tile_args gathered = *t;
    int64_t index[GMM_CKPT_LOOPS] = {0}, i, a, b;
    int l;
    gathered.src = square;
    gathered.src_base = 0;
    do {
        int64_t src0 = src, dst0 = 0;
        for (l = 0; l < outer; l++) {
            src0 += index[l] * m->src_step[l];
            dst0 += index[l] * t->dst_step[l];
        }
        if (!transposed) gmm__ck_move_run(t, src0, dst0, t->count[x], m->src_step[x], t->dst_step[x]);
        for (a = 0; transposed && a < t->count[y]; a += TILE)
            for (b = 0; b < t->count[x]; b += TILE) {
                const int64_t rows = gmm__min_i64(TILE, t->count[y] - a), cols = gmm__min_i64(TILE, t->count[x] - b);
                const int64_t first = src0 + a * m->src_step[y] + b * m->src_step[x];
                if (gather) /* copies source rows, whose stride may map all of them to one cache set */
                    for (i = 0; i < cols; i++)
                        memcpy(square + i * (TILE + 8) * t->src_unit,
                               t->src + (first + i * m->src_step[x] - t->src_base) * t->src_unit,
                               (size_t)(rows * t->src_unit));
                for (i = 0; i < rows; i++) {
                    const int64_t d = dst0 + (a + i) * t->dst_step[y] + b * t->dst_step[x];
                    if (gather) gmm__ck_move_run(&gathered, i, d, cols, TILE + 8, t->dst_step[x]);
                    else gmm__ck_move_run(t, first + i * m->src_step[y], d, cols, m->src_step[x], t->dst_step[x]);
                }
            }
        for (l = outer - 1; l >= 0 && ++index[l] == t->count[l]; l--) index[l] = 0;
    } while (l >= 0);
}

/* One call of gmm_ckpt_apply. */
typedef struct gmm__ck_apply_call {
    const gmm_ckpt_plan *plan;
    const gmm_ckpt_run *run;
    gmm_error *error;
} gmm__ck_apply_call;

static const char gmm__ck_apply_name[] = "gmm_ckpt_apply";

static gmm_status gmm__ck_read(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, const gmm_ckpt_tensor *t,
                               int64_t offset, void *dst, int64_t bytes) {
    const int code = c->run->io.read(c->run->io.user, m->part, t->storage, t->offset + offset, dst, bytes);
    if (!code) return GMM_OK;
    return gmm__fail(c->error, GMM_E_IO,
                     "%s: io.read gave %d for %lld bytes at %lld of \"%.160s\" (part %d, storage %d)",
                     gmm__ck_apply_name, code, (long long)bytes, (long long)offset, t->name, (int)m->part,
                     (int)t->storage);
}

static gmm_status gmm__ck_write(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, int64_t offset, const void *src,
                                int64_t bytes) {
    const int code = c->run->io.write(c->run->io.user, m->dst, offset, src, bytes);
    if (!code) return GMM_OK;
    return gmm__fail(c->error, GMM_E_IO, "%s: io.write gave %d for %lld bytes at %lld of \"%.160s\"",
                     gmm__ck_apply_name, code, (long long)bytes, (long long)offset,
                     c->plan->targets->tensors[m->dst].name);
}

/* Bytes that a contiguous copy reads or writes at a time; span from which the iterations of a sparse loop are read one
   by one. */
enum { GMM__CK_CHUNK_BYTES = 4 << 20, GMM__CK_GAP_BYTES = 4096 };

/* Applies a move that copies contiguous bytes, or writes contiguous zeros. */
static gmm_status gmm__ck_apply_contiguous(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, const char *src_memory,
                                           char *dst_memory) {
    const gmm_ckpt_tensor *s = m->kind == GMM_CKPT_ZERO ? NULL : &c->plan->parts[m->part].table->tensors[m->src];
    const int64_t unit = gmm__ck_unit_bytes(c->plan->targets->tensors[m->dst].dtype), bytes = m->count[0] * unit;
    const int64_t chunk = gmm__min_i64((int64_t)(c->run->scratch_bytes < GMM__CK_CHUNK_BYTES ? c->run->scratch_bytes
                                                                                      : (size_t)GMM__CK_CHUNK_BYTES),
                                                                                          bytes);
    const int64_t src = m->src_at * unit, dst = m->dst_at * unit;
    int64_t done, n;
    gmm_status status = GMM_OK;
    if (dst_memory && !s) {
        memset(dst_memory + dst, 0, (size_t)bytes);
        return GMM_OK;
    }
    if (dst_memory && src_memory) {
        memcpy(dst_memory + dst, src_memory + src, (size_t)bytes);
        return GMM_OK;
    }
    if (dst_memory) return gmm__ck_read(c, m, s, src, dst_memory + dst, bytes);
    if (!s) memset(c->run->scratch, 0, (size_t)chunk);
    for (done = 0; !status && done < bytes; done += n) {
        n = gmm__min_i64(chunk, bytes - done);
        if (s && !src_memory) status = gmm__ck_read(c, m, s, src + done, c->run->scratch, n);
        if (!status)
            status = gmm__ck_write(c, m, dst + done,
                                   src_memory ? src_memory + src + done : (const char *)c->run->scratch, n);
    }
    return status;
}

/* Chooses the iterations of each loop in a tile, beginning with the loop of the smallest step. A tile spans at most
   `in` source elements and has at most `out` elements. It does not span iterations of a sparse loop (dense > 0). */
static void gmm__ck_choose_tile(const gmm_ckpt_move *m, const int64_t *step, int64_t in, int64_t out, int64_t dense,
                                int64_t *tile) {
    int64_t span = 1, volume = 1;
    int l, k, done[GMM_CKPT_LOOPS] = {0};
    for (l = 0; l < m->loops; l++) tile[l] = 1;
    for (k = 0; k < m->loops; k++) {
        int64_t n, by_in;
        int best = -1;
        for (l = 0; l < m->loops; l++)
            if (!done[l] && (best < 0 || step[l] < step[best])) best = l;
        done[best] = 1;
        if (dense && span >= dense && m->src_step[best] > 2 * span) break;
        by_in = m->src_step[best] ? 1 + (in - span) / m->src_step[best] : m->count[best];
        n = gmm__min_i64(m->count[best], gmm__min_i64(by_in, out / volume));
        tile[best] = n;
        span += (n - 1) * m->src_step[best];
        volume *= n;
        if (n < m->count[best]) break;
    }
}

/* Length, in rows, of a run of elements that overlaps at most `scales` rows of scales of blocks of `block` rows; 0 = of
   whole matrices. A run as long as n - 1 rows overlaps n of them, and with that at most n rows of scales, or
   3 + n / block + n / rows of them. */
static int64_t gmm__ck_scaled_rows(int64_t scales, int64_t rows, int64_t block) {
    const int64_t least = gmm__min_i64(rows, block ? block : 1 << 20); /* the product below fits 63 bits */
    const int64_t rows_of_scales = scales > 3 ? 1 + (scales - 3) * least / 2 : 0;
    return (rows_of_scales > scales ? rows_of_scales : scales) - 1;
}

/* Writes zeros in several contiguous runs. */
static gmm_status gmm__ck_apply_zeros(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, char *dst_memory) {
    const int last = m->loops - 1, contiguous = m->dst_step[last] == 1;
    const int outer = contiguous ? last : m->loops;
    int64_t index[GMM_CKPT_LOOPS] = {0};
    gmm_ckpt_move run = *m;
    int l;
    run.loops = 1;
    run.count[0] = contiguous ? m->count[last] : 1;
    run.dst_step[0] = 1;
    do {
        gmm_status status;
        run.dst_at = m->dst_at;
        for (l = 0; l < outer; l++) run.dst_at += index[l] * m->dst_step[l];
        status = gmm__ck_apply_contiguous(c, &run, NULL, dst_memory);
        if (status) return status;
        for (l = outer - 1; l >= 0 && ++index[l] == m->count[l]; l--) index[l] = 0;
    } while (l >= 0);
    return GMM_OK;
}

/* How a move is applied in tiles: the addresses of its tensors, and of the parts of the scratch that stand in for those
   which are not in memory. */
typedef struct gmm__ck_tiling {
    const gmm__ck_apply_call *call;
    const gmm_ckpt_move *move;
    const gmm_ckpt_tensor *src, *scale;               /* scale: NULL unless the move dequantizes */
    const char *src_memory, *scale_memory;            /* NULL: read by io.read */
    char *dst_memory;                                 /* NULL: written by io.write */
    char *src_scratch, *scale_scratch, *dst_scratch;
    int64_t count[GMM_CKPT_LOOPS];                    /* iterations of each loop in a tile */
    gmm__ck_tile_args tile;                           /* of the present tile */
} gmm__ck_tiling;

static const char *gmm__ck_tensor_memory(const gmm_ckpt_table *table, const gmm_ckpt_tensor *t) {
    const char *base = table->storages[t->storage].base;
    return base ? base + t->offset : NULL;
}

/* Divides the scratch among scales, source and destination, and chooses the tile that fits. */
static void gmm__ck_choose_tiling(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, char *dst_memory,
                                  gmm__ck_tiling *g) {
    const gmm_ckpt_table *table = c->plan->parts[m->part].table;
    gmm__ck_tile_args *t = &g->tile;
    int64_t in_limit = INT64_MAX / 4, out_limit = INT64_MAX / 4; /* elements */
    int64_t scratch_bytes = (int64_t)c->run->scratch_bytes, scale_bytes = 0, area_bytes;
    char *scratch = (char *)c->run->scratch;
    memset(g, 0, sizeof *g);
    g->call = c;
    g->move = m;
    g->src = &table->tensors[m->src];
    g->src_memory = gmm__ck_tensor_memory(table, g->src);
    g->dst_memory = dst_memory;
    t->move = m;
    t->src_dtype = g->src->dtype;
    t->dst_dtype = c->plan->targets->tensors[m->dst].dtype;
    t->src_unit = gmm__ck_unit_bytes(t->src_dtype);
    t->dst_unit = gmm__ck_unit_bytes(t->dst_dtype);
    if (m->kind == GMM_CKPT_DEQUANT) {
        gmm__ck_scale_shape(g->src, m->scaling, &t->rows, &t->cols, &t->scale_rows, &t->scale_cols);
        gmm__ck_block_of(m->scaling, &t->block_rows, &t->block_cols);
        g->scale = &table->tensors[m->scale];
        t->packed = gmm__ck_is_packed(t->src_dtype);
        t->scale_dtype = g->scale->dtype;
        t->scale_unit = gmm__ck_unit_bytes(t->scale_dtype);
        g->scale_memory = gmm__ck_tensor_memory(table, g->scale);
        if (!g->scale_memory) { /* an eighth of the scratch holds the scales of a tile */
            scale_bytes = scratch_bytes / 8;
            in_limit = gmm__ck_scaled_rows(scale_bytes / (t->scale_cols * t->scale_unit), t->rows, t->block_rows);
            if (!gmm__mul(in_limit, t->cols, &in_limit)) in_limit = INT64_MAX / 4;
        }
    }
    area_bytes = scratch_bytes - scale_bytes;
    if (!g->dst_memory && !g->src_memory) area_bytes /= 2; /* source and destination have half of the rest each */
    g->scale_scratch = scratch;
    g->src_scratch = scratch ? scratch + scale_bytes : NULL; /* all tensors may be in memory, without a scratch */
    g->dst_scratch = g->src_memory || !scratch ? g->src_scratch : g->src_scratch + area_bytes;
    if (!g->src_memory) in_limit = gmm__min_i64(in_limit, t->packed ? (area_bytes - 1) * 2
                                                                            : area_bytes / t->src_unit);
    if (!g->dst_memory) out_limit = area_bytes / t->dst_unit;
    gmm__ck_choose_tile(m, g->src_memory ? m->dst_step : m->src_step, in_limit, out_limit,
                        g->src_memory ? 0 : GMM__CK_GAP_BYTES / t->src_unit, g->count);
}

/* Makes source elements [src, src + span) and their scales readable: in memory, or read into the scratch. */
static gmm_status gmm__ck_read_tile(gmm__ck_tiling *g, int64_t src, int64_t span) {
    gmm__ck_tile_args *t = &g->tile;
    gmm_status status = GMM_OK;
    t->src = g->src_memory;
    t->src_base = 0;
    if (!g->src_memory) {
        const int64_t first = t->packed ? src / 2 : src * t->src_unit;
        const int64_t end = t->packed ? (src + span + 1) / 2 : (src + span) * t->src_unit;
        status = gmm__ck_read(g->call, g->move, g->src, first, g->src_scratch, end - first);
        t->src = g->src_scratch;
        t->src_base = t->packed ? first * 2 : src;
    }
    t->scale = g->scale_memory;
    if (g->scale && !g->scale_memory && !status) {
        const int64_t row0 = src / t->cols, row1 = (src + span - 1) / t->cols;
        const int64_t first = row0 / t->rows * t->scale_rows + gmm__ck_scale_line(g->move->scaling, row0 % t->rows);
        const int64_t end = row1 / t->rows * t->scale_rows + gmm__ck_scale_line(g->move->scaling, row1 % t->rows) + 1;
        t->scale_base = first * t->scale_cols;
        status = gmm__ck_read(g->call, g->move, g->scale, t->scale_base * t->scale_unit, g->scale_scratch,
                              (end - first) * t->scale_cols * t->scale_unit);
        t->scale = g->scale_scratch;
    }
    return status;
}

/* Writes the tile in the scratch, which is dense, to destination element `dst` on, as contiguous runs. */
static gmm_status gmm__ck_write_tile(const gmm__ck_tiling *g, int64_t dst) {
    const gmm_ckpt_move *m = g->move;
    const gmm__ck_tile_args *t = &g->tile;
    int64_t run = 1, runs = 1, i;
    int outer = m->loops, l;
    gmm_status status = GMM_OK;
    for (; outer > 0 && m->dst_step[outer - 1] == run; outer--) run *= t->count[outer - 1];
    for (l = 0; l < outer; l++) runs *= t->count[l];
    for (i = 0; !status && i < runs; i++) {
        int64_t offset = dst, remaining = i;
        for (l = outer - 1; l >= 0; l--) {
            offset += remaining % t->count[l] * m->dst_step[l];
            remaining /= t->count[l];
        }
        status = gmm__ck_write(g->call, m, offset * t->dst_unit, g->dst_scratch + i * run * t->dst_unit,
                               run * t->dst_unit);
    }
    return status;
}

static gmm_status gmm__ck_apply_tiles(gmm__ck_tiling *g) {
    const gmm_ckpt_move *m = g->move;
    gmm__ck_tile_args *t = &g->tile;
    int64_t index[GMM_CKPT_LOOPS] = {0};
    int l;
    do {
        int64_t src = m->src_at, dst = m->dst_at, span = 1, dense = 1;
        gmm_status status;
        for (l = 0; l < m->loops; l++) {
            t->count[l] = gmm__min_i64(g->count[l], m->count[l] - index[l]);
            src += index[l] * m->src_step[l];
            dst += index[l] * m->dst_step[l];
            span += (t->count[l] - 1) * m->src_step[l];
        }
        for (l = m->loops - 1; l >= 0; l--) {
            t->dst_step[l] = g->dst_memory ? m->dst_step[l] : dense;
            dense *= t->count[l];
        }
        status = gmm__ck_read_tile(g, src, span);
        if (status) return status;
        t->dst = g->dst_memory ? g->dst_memory + dst * t->dst_unit : g->dst_scratch;
        gmm__ck_move_tile(t, src);
        if (!g->dst_memory) status = gmm__ck_write_tile(g, dst);
        if (status) return status;
        for (l = m->loops - 1; l >= 0; l--) {
            index[l] += t->count[l];
            if (index[l] < m->count[l]) break;
            index[l] = 0;
        }
    } while (l >= 0);
    return GMM_OK;
}

static gmm_status gmm__ck_apply_move(const gmm__ck_apply_call *c, const gmm_ckpt_move *m) {
    const gmm_ckpt_table *table = c->plan->parts[m->part].table;
    const gmm_ckpt_tensor *src = m->kind == GMM_CKPT_ZERO ? NULL : &table->tensors[m->src];
    char *dst_memory = c->run->memory ? (char *)c->run->memory + c->plan->targets->tensors[m->dst].offset : NULL;
    gmm__ck_tiling tiling;
    if (m->kind == GMM_CKPT_VIEW) return GMM_OK;
    if ((m->kind == GMM_CKPT_COPY || m->kind == GMM_CKPT_ZERO) && m->loops == 1 && m->dst_step[0] == 1 &&
        (!src || m->src_step[0] == 1))
        return gmm__ck_apply_contiguous(c, m, src ? gmm__ck_tensor_memory(table, src) : NULL, dst_memory);
    if (!src) return gmm__ck_apply_zeros(c, m, dst_memory);
    gmm__ck_choose_tiling(c, m, dst_memory, &tiling);
    return gmm__ck_apply_tiles(&tiling);
}

GMMDEF gmm_status gmm_ckpt_apply(const gmm_ckpt_plan *plan, const gmm_ckpt_run *run, int64_t *cursor,
                                 gmm_error *error) {
    gmm__ck_apply_call c;
    gmm_ckpt_run r = GMM_ZERO;
    const char *fn = gmm__ck_apply_name;
    gmm_status s;
    char rule[96];
    int64_t i;
    int reads = 0;
    if (!plan || !run || !cursor)
        return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, !plan ? "plan" : !run ? "run" : "cursor");
    if ((s = gmm__read_sized(&r, sizeof r, run, rule)) != GMM_OK) return gmm__fail(error, s, "%s: run: %s", fn, rule);
    if (r.end == 0) r.end = plan->count;
    if (r.end < 0 || r.end > plan->count || *cursor < 0 || *cursor > r.end)
        return gmm__fail(error, GMM_E_ARG, "%s: cursor %lld, end %lld: must be ordered in [0, %lld]", fn,
                         (long long)*cursor, (long long)r.end, (long long)plan->count);
    for (i = *cursor; i < r.end; i++) {
        const gmm_ckpt_move *m = &plan->moves[i];
        const gmm_ckpt_table *table = plan->parts[m->part].table;
        if (m->kind == GMM_CKPT_VIEW || m->kind == GMM_CKPT_ZERO) continue;
        reads |= !table->storages[table->tensors[m->src].storage].base ||
                 (m->scale >= 0 && !table->storages[table->tensors[m->scale].storage].base);
    }
    if ((reads && !r.io.read) || (!r.memory && !r.io.write && plan->cost.bytes_written))
        return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn,
                         reads && !r.io.read ? "io.read, with storages that are not in memory,"
                                             : "io.write, without memory,");
    if ((!r.memory || reads) && plan->cost.bytes_written &&
        (!r.scratch || r.scratch_bytes < (size_t)plan->cost.scratch_min))
        return gmm__fail(error, r.scratch ? GMM_E_WORKSPACE : GMM_E_NULL, "%s: scratch of %llu bytes: at least %lld "
                         "are needed", fn, (unsigned long long)r.scratch_bytes, (long long)plan->cost.scratch_min);
    if (r.memory && plan->cost.bytes_written) {
        const uintptr_t begin = (uintptr_t)r.memory, end = begin + (uintptr_t)plan->cost.target_bytes;
        for (i = 0; i < plan->source_range_count; i++)
            if ((uintptr_t)plan->source_ranges[i].begin < end && begin < (uintptr_t)plan->source_ranges[i].end)
                return gmm__fail(error, GMM_E_ARG, "%s: memory %p overlaps a storage of the source", fn, r.memory);
    }
    c.plan = plan;
    c.run = &r;
    c.error = error;
    for (; *cursor < r.end; ++*cursor) {
        const gmm_ckpt_move *m = &plan->moves[*cursor];
        const gmm_status status = gmm__ck_apply_move(&c, m);
        if (status) return status;
        if (r.io.done && plan->last_move[m->dst] == *cursor) r.io.done(r.io.user, m->dst);
    }
    return GMM_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */
