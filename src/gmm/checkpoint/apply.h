/* ............................................................................................... 15.10 Applying ... */
/* Applies the moves of a plan to memory or through callbacks. */

static float gmm__ck_load_float(gmm_dtype dtype, const char *at) { /* any alignment */
    uint32_t u = 0;
    memcpy(&u, at, dtype == GMM_F32 ? 4 : 2);
    return dtype == GMM_F32 ? gmm_f32_from_bits(u) : dtype == GMM_BF16 ? gmm_bf16_to_f32((uint16_t)u)
                                                                       : gmm_f16_to_f32((uint16_t)u);
}

static void gmm__ck_store_float(gmm_dtype dtype, char *at, float v) {
    const uint32_t w = gmm_f32_bits(v);
    const uint16_t h = dtype == GMM_BF16 ? gmm_f32_to_bf16(v) : gmm_f32_to_f16(v);
    if (dtype == GMM_F32) memcpy(at, &w, 4);
    else memcpy(at, &h, 2);
}

/* One tile of a move: its source, its destination and its strides in elements. */
typedef struct gmm__ck_tile_args {
    const gmm_ckpt_move *move;
    gmm_dtype src_dtype, dst_dtype;
    int64_t src_unit, dst_unit;
    int64_t count[GMM_CKPT_LOOPS], dst_step[GMM_CKPT_LOOPS];
    const char *src;                              /* address of element src_base */
    char *dst;                                    /* address of the first element */
    const char *scale;                            /* address of scale scale_base */
    int64_t src_base, scale_base;
    int64_t rows, cols, scale_rows, scale_cols;   /* DEQUANT */
} gmm__ck_tile_args;

static float gmm__ck_dequant(const gmm__ck_tile_args *w, int64_t i) {
    const int mx = w->move->scaling == GMM_SCALING_MX32;
    const int64_t row = i / w->cols, col = i % w->cols;
    const int64_t matrix = row / w->rows, r = row % w->rows;
    const int64_t s = (matrix * w->scale_rows + (mx ? r : r / 128)) * w->scale_cols + col / (mx ? 32 : 128) -
                      w->scale_base;
    float f;
    if (mx) {
        const uint32_t pair = (uint8_t)w->src[i / 2 - w->src_base / 2];
        return gmm_e2m1_to_f32((uint8_t)(i % 2 ? pair >> 4 : pair & 15u)) * gmm_e8m0_to_f32((uint8_t)w->scale[s]);
    }
    memcpy(&f, w->scale + s * 4, sizeof f);
    return (w->src_dtype == GMM_E5M2 ? gmm_e5m2_to_f32 : gmm_e4m3_to_f32)((uint8_t)w->src[i - w->src_base]) * f;
}

/* Moves one innermost loop from source element `src` to destination element `dst`. */
static void gmm__ck_move_run(const gmm__ck_tile_args *w, int64_t src, int64_t dst, int64_t n, int64_t ss, int64_t ds) {
    const char *from = w->src + (src - w->src_base) * w->src_unit;
    char *to = w->dst + dst * w->dst_unit;
    int64_t i;
    switch (w->move->kind) {
    case GMM_CKPT_COPY:
        if (ss == 1 && ds == 1) {
            memcpy(to, from, (size_t)(n * w->dst_unit));
            return;
        }
        switch (w->dst_unit) { /* constant sizes become single instructions */
        case 1: for (i = 0; i < n; i++) to[i * ds] = from[i * ss]; return;
        case 2: for (i = 0; i < n; i++) memcpy(to + i * ds * 2, from + i * ss * 2, 2); return;
        case 4: for (i = 0; i < n; i++) memcpy(to + i * ds * 4, from + i * ss * 4, 4); return;
        default: for (i = 0; i < n; i++) memcpy(to + i * ds * 8, from + i * ss * 8, 8); return;
        }
    case GMM_CKPT_CONVERT:
        for (i = 0; i < n; i++)
            gmm__ck_store_float(w->dst_dtype, to + i * ds * w->dst_unit, gmm__ck_load_float(w->src_dtype,
                                                                                from + i * ss * w->src_unit));
        return;
    default:
        for (i = 0; i < n; i++)
            gmm__ck_store_float(w->dst_dtype, to + i * ds * w->dst_unit, gmm__ck_dequant(w, src + i * ss));
        return;
    }
}

/* Moves a whole tile, from source element `src` to the start of the destination. */
static void gmm__ck_move_tile(const gmm__ck_tile_args *w, int64_t src) {
    enum { TILE = 32 };
    const gmm_ckpt_move *m = w->move;
    const int n = m->loops, y = n - 2, x = n - 1;
    const int transposed = n > 1 && m->src_step[n - 1] > m->src_step[n > 1 ? n - 2 : 0];
    const int outer = n - (transposed ? 2 : 1);
    const int gather = transposed && m->kind == GMM_CKPT_COPY && m->src_step[y < 0 ? 0 : y] == 1;
    char square[TILE * (TILE + 8) * 8];
    gmm__ck_tile_args gathered = *w;
    int64_t at[GMM_CKPT_LOOPS] = {0}, i, a, b;
    int l;
    gathered.src = square;
    gathered.src_base = 0;
    do {
        int64_t from = src, to = 0;
        for (l = 0; l < outer; l++) {
            from += at[l] * m->src_step[l];
            to += at[l] * w->dst_step[l];
        }
        if (!transposed) gmm__ck_move_run(w, from, to, w->count[x], m->src_step[x], w->dst_step[x]);
        /* in square tiles, so that both sides stay in the cache */
        for (a = 0; transposed && a < w->count[y]; a += TILE)
            for (b = 0; b < w->count[x]; b += TILE) {
                const int64_t high = gmm__min_i64(TILE, w->count[y] - a), wide = gmm__min_i64(TILE, w->count[x] - b);
                const int64_t first = from + a * m->src_step[y] + b * m->src_step[x];
                if (gather) /* copies source rows, whose stride may map all of them to one cache set */
                    for (i = 0; i < wide; i++)
                        memcpy(square + i * (TILE + 8) * w->src_unit,
                               w->src + (first + i * m->src_step[x] - w->src_base) * w->src_unit,
                               (size_t)(high * w->src_unit));
                for (i = 0; i < high; i++) {
                    const int64_t at_dst = to + (a + i) * w->dst_step[y] + b * w->dst_step[x];
                    if (gather) gmm__ck_move_run(&gathered, i, at_dst, wide, TILE + 8, w->dst_step[x]);
                    else
                        gmm__ck_move_run(w, first + i * m->src_step[y], at_dst, wide, m->src_step[x], w->dst_step[x]);
                }
            }
        for (l = outer - 1; l >= 0 && ++at[l] == w->count[l]; l--) at[l] = 0;
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
                               int64_t at, void *to, int64_t bytes) {
    const int code = c->run->io.read(c->run->io.user, m->part, t->storage, t->offset + at, to, bytes);
    if (!code) return GMM_OK;
    return gmm__fail(c->error, GMM_E_IO, "%s: io.read gave %d for %lld bytes at %lld of \"%.160s\" (part %d, storage "
                     "%d)",
                     gmm__ck_apply_name, code, (long long)bytes, (long long)at, t->name, (int)m->part, (int)t->storage);
}

static gmm_status gmm__ck_write(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, int64_t at, const void *from,
                                int64_t bytes) {
    const int code = c->run->io.write(c->run->io.user, m->dst, at, from, bytes);
    if (!code) return GMM_OK;
    return gmm__fail(c->error, GMM_E_IO, "%s: io.write gave %d for %lld bytes at %lld of \"%.160s\"",
                     gmm__ck_apply_name,
                     code, (long long)bytes, (long long)at, c->plan->targets->tensors[m->dst].name);
}

/* Bytes: the most that one contiguous copy moves at once; span from which a sparse loop gets reads of its own. */
enum { GMM__CK_CHUNK_BYTES = 4 << 20, GMM__CK_GAP_BYTES = 4096 };

/* Applies a move that copies contiguous bytes, or writes contiguous zeros. */
static gmm_status gmm__ck_apply_contiguous(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, const char *from,
                                           char *to) {
    const gmm_ckpt_tensor *s = m->kind == GMM_CKPT_ZERO ? NULL : &c->plan->parts[m->part].table->tensors[m->src];
    const int64_t unit = gmm__ck_unit_bytes(c->plan->targets->tensors[m->dst].dtype), bytes = m->count[0] * unit;
    const int64_t chunk = gmm__min_i64((int64_t)(c->run->scratch_bytes < GMM__CK_CHUNK_BYTES ? c->run->scratch_bytes
                                                                                      : (size_t)GMM__CK_CHUNK_BYTES),
                                                                                          bytes);
    const int64_t src = m->src_at * unit, dst = m->dst_at * unit;
    int64_t at, n;
    gmm_status status = GMM_OK;
    if (to && !s) {
        memset(to + dst, 0, (size_t)bytes);
        return GMM_OK;
    }
    if (to && from) {
        memcpy(to + dst, from + src, (size_t)bytes);
        return GMM_OK;
    }
    if (to) return gmm__ck_read(c, m, s, src, to + dst, bytes);
    if (!s) memset(c->run->scratch, 0, (size_t)chunk);
    for (at = 0; !status && at < bytes; at += n) {
        n = gmm__min_i64(chunk, bytes - at);
        if (s && !from) status = gmm__ck_read(c, m, s, src + at, c->run->scratch, n);
        if (!status) status = gmm__ck_write(c, m, dst + at, from ? from + src + at : (const char *)c->run->scratch, n);
    }
    return status;
}

/* Chooses how much of each loop is done at once, from the loop with the smallest step outwards: at most `in` source
   elements from first to last, and `out` elements altogether. Sparse loops are not spanned. */
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

/* Length, in rows, of a run of elements that overlaps at most `scales` rows of 128x128 scales. A run as long as n - 1
   rows overlaps n of them, and with that at most n rows of scales, or 3 + n / 128 + n / rows of them. */
static int64_t gmm__ck_scaled_rows(int64_t scales, int64_t rows) {
    const int64_t many = 1 + (scales - 3) * gmm__min_i64(rows, 128) / 2;
    return (many > scales ? many : scales) - 1;
}

static gmm_status gmm__ck_apply_move(const gmm__ck_apply_call *c, const gmm_ckpt_move *m) {
    const gmm_ckpt_tensor *d = &c->plan->targets->tensors[m->dst], *s = NULL, *sc = NULL;
    const gmm_ckpt_table *table = c->plan->parts[m->part].table;
    const int mx = m->kind == GMM_CKPT_DEQUANT && m->scaling == GMM_SCALING_MX32;
    const char *from = NULL, *scale_from = NULL;
    char *to = c->run->memory ? (char *)c->run->memory + d->offset : NULL, *in_area, *out_area, *scale_area;
    int64_t scale_unit = 0, scale_bytes = 0, in_limit = INT64_MAX / 4, out_limit = INT64_MAX / 4, half;
    int64_t tile[GMM_CKPT_LOOPS], at[GMM_CKPT_LOOPS] = {0};
    gmm__ck_tile_args w;
    gmm_status status;
    int l;
    if (m->kind == GMM_CKPT_VIEW) return GMM_OK;
    if (m->kind != GMM_CKPT_ZERO) {
        s = &table->tensors[m->src];
        if (table->storages[s->storage].base) from = table->storages[s->storage].base + s->offset;
    }
    if ((m->kind == GMM_CKPT_COPY || m->kind == GMM_CKPT_ZERO) && m->loops == 1 && m->dst_step[0] == 1 &&
        (!s || m->src_step[0] == 1))
        return gmm__ck_apply_contiguous(c, m, from, to);
    if (!s) { /* zeros in several contiguous runs */
        gmm_ckpt_move run = *m;
        run.loops = 1;
        run.count[0] = m->dst_step[m->loops - 1] == 1 ? m->count[m->loops - 1] : 1;
        run.dst_step[0] = 1;
        for (;;) {
            const int last = m->dst_step[m->loops - 1] == 1 ? m->loops - 1 : m->loops;
            run.dst_at = m->dst_at;
            for (l = 0; l < last; l++) run.dst_at += at[l] * m->dst_step[l];
            status = gmm__ck_apply_contiguous(c, &run, NULL, to);
            if (status) return status;
            for (l = last - 1; l >= 0 && ++at[l] == m->count[l]; l--) at[l] = 0;
            if (l < 0) return GMM_OK;
        }
    }
    memset(&w, 0, sizeof w);
    w.move = m;
    w.src_dtype = s->dtype;
    w.dst_dtype = d->dtype;
    w.src_unit = mx ? 1 : gmm__ck_unit_bytes(s->dtype);
    w.dst_unit = gmm__ck_unit_bytes(d->dtype);
    half = (int64_t)c->run->scratch_bytes;
    scale_area = (char *)c->run->scratch;
    if (m->kind == GMM_CKPT_DEQUANT) {
        gmm__ck_scale_shape(s, m->scaling, &w.rows, &w.cols, &w.scale_rows, &w.scale_cols);
        sc = &table->tensors[m->scale];
        scale_unit = mx ? 1 : 4;
        if (table->storages[sc->storage].base) {
            scale_from = table->storages[sc->storage].base + sc->offset;
        } else { /* an eighth of the scratch holds the scales of what is done at once */
            scale_bytes = half / 8;
            half -= scale_bytes;
            in_limit = mx ? (scale_bytes - 2) * 32 : gmm__ck_scaled_rows(scale_bytes / (w.scale_cols * 4), w.rows);
            if (!mx && !gmm__mul(in_limit, w.cols, &in_limit)) in_limit = INT64_MAX / 4;
        }
    }
    in_area = scale_area ? scale_area + scale_bytes : NULL; /* NULL where all is in memory */
    half = to || from ? half : half / 2;
    out_area = from || !in_area ? in_area : in_area + half;
    if (!from) in_limit = gmm__min_i64(in_limit, mx ? (half - 1) * 2 : half / w.src_unit);
    if (!to) out_limit = half / w.dst_unit;
    gmm__ck_choose_tile(m, from ? m->dst_step : m->src_step, in_limit, out_limit,
                        from ? 0 : GMM__CK_GAP_BYTES / w.src_unit, tile);
    for (;;) {
        int64_t src = m->src_at, dst = m->dst_at, span = 1, run = 1, runs = 1, i;
        int contiguous = m->loops;
        for (l = 0; l < m->loops; l++) {
            w.count[l] = gmm__min_i64(tile[l], m->count[l] - at[l]);
            src += at[l] * m->src_step[l];
            dst += at[l] * m->dst_step[l];
            span += (w.count[l] - 1) * m->src_step[l];
        }
        for (l = m->loops - 1; l >= 0; l--) { /* strides of the target, or of a dense tile in scratch */
            w.dst_step[l] = to ? m->dst_step[l] : run;
            run *= w.count[l];
        }
        w.src = from;
        w.src_base = 0;
        status = GMM_OK;
        if (!from) {
            const int64_t first = mx ? src / 2 : src * w.src_unit;
            const int64_t end = mx ? (src + span + 1) / 2 : (src + span) * w.src_unit;
            status = gmm__ck_read(c, m, s, first, in_area, end - first);
            w.src = in_area;
            w.src_base = mx ? first * 2 : src;
        }
        w.scale = scale_from;
        if (sc && !scale_from && !status) {
            const int64_t r0 = src / w.cols, r1 = (src + span - 1) / w.cols;
            int64_t first = r0 / w.rows * w.scale_rows + (mx ? r0 % w.rows : r0 % w.rows / 128);
            int64_t end = r1 / w.rows * w.scale_rows + (mx ? r1 % w.rows : r1 % w.rows / 128);
            first = first * w.scale_cols + (mx ? src % w.cols / 32 : 0);
            end = end * w.scale_cols + (mx ? (src + span - 1) % w.cols / 32 + 1 : w.scale_cols);
            status = gmm__ck_read(c, m, sc, first * scale_unit, scale_area, (end - first) * scale_unit);
            w.scale = scale_area;
            w.scale_base = first;
        }
        if (status) return status;
        w.dst = to ? to + dst * w.dst_unit : out_area;
        gmm__ck_move_tile(&w, src);
        if (!to) { /* the tile is written as contiguous runs */
            run = 1;
            for (; contiguous > 0 && m->dst_step[contiguous - 1] == run; contiguous--) run *= w.count[contiguous - 1];
            for (l = 0; l < contiguous; l++) runs *= w.count[l];
            for (i = 0; !status && i < runs; i++) {
                int64_t offset = dst, remaining = i;
                for (l = contiguous - 1; l >= 0; l--) {
                    offset += remaining % w.count[l] * m->dst_step[l];
                    remaining /= w.count[l];
                }
                status = gmm__ck_write(c, m, offset * w.dst_unit, out_area + i * run * w.dst_unit, run * w.dst_unit);
            }
            if (status) return status;
        }
        for (l = m->loops - 1; l >= 0; l--) {
            at[l] += w.count[l];
            if (at[l] < m->count[l]) break;
            at[l] = 0;
        }
        if (l < 0) return GMM_OK;
    }
}

GMMDEF gmm_status gmm_ckpt_apply(const gmm_ckpt_plan *plan, const gmm_ckpt_run *run, int64_t *cursor,
                                 gmm_error *error) {
    gmm__ck_apply_call c;
    gmm_ckpt_run r = GMM_ZERO;
    const char *fn = gmm__ck_apply_name;
    int64_t i;
    int reads = 0;
    if (!plan || !run || !cursor)
        return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, !plan ? "plan" : !run ? "run" : "cursor");
    if (!gmm__copy_sized(&r, sizeof r, run))
        return gmm__fail(error, GMM_E_VERSION, "%s: run: struct_size %u is larger than the %u bytes of version %s", fn,
                         run->struct_size, (unsigned)sizeof r, GMM_VERSION_STRING);
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
        return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, reads && !r.io.read ? "io.read, with storages that "
                         "are "
                         "not in memory," : "io.write, without memory,");
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
