/* ......................................................................................... Checkpoints: moves ... */

/* How one array of a copy lies: units of per[0] rows by per[1] columns of the matrix, `step` apart along either;
   extents count units, padding included. */
typedef struct gmm__gtp_array {
    gmm_dtype dtype;
    int32_t lead;     /* axis of the matrix along which rows of the array follow one another */
    int64_t per[2], step[2], extent[2];
    int64_t shape[2]; /* of its tensor */
} gmm__gtp_array;

/* One side of an item: the shard with defaults, its plan, extents and arrays. */
typedef struct gmm__gtp_side {
    gmm_shard shard;
    gmm_shard_plan plan;
    gmm__gtp_array array[2]; /* [DATA, SCALE] */
    gmm_extent *extents;
    int32_t count;
} gmm__gtp_side;

typedef struct gmm__gtp_planner {
    const char *fn;
    const char *key;             /* the item at work */
    int exports;
    const gmm_ckpt_part *parts;
    int32_t part_count;
    gmm_allocator allocator;
    gmm_ckpt_report *report;
    gmm_ckpt_tensor *targets;
    int64_t target_count;
    gmm_ckpt_move *moves;
    size_t move_count, move_room;
    gmm_extent *extents[2];      /* of the target, of what is stored */
    int32_t room[2];
} gmm__gtp_planner;

static gmm_status gmm__gtp_refuse(gmm__gtp_planner *p, gmm_status status, gmm_ckpt_reason reason, const char *format,
                                  ...) {
    char text[360];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (!p->report) return status;
    p->report->reason = reason;
    (void)snprintf(p->report->key, sizeof p->report->key, "%s", p->key ? p->key : "");
    return gmm__fail(&p->report->error, status, "%s: %s%.100s%s%s", p->fn, p->key ? "\"" : "", p->key ? p->key : "",
                     p->key ? "\": " : "", text);
}

static void *gmm__gtp_alloc(gmm__gtp_planner *p, size_t bytes) {
    return p->allocator.alloc ? p->allocator.alloc(p->allocator.user, bytes) : GMM_MALLOC(bytes);
}
static void gmm__gtp_free(gmm__gtp_planner *p, void *memory) {
    if (!memory) return;
    if (p->allocator.release) p->allocator.release(p->allocator.user, memory);
    else GMM_FREE(memory);
}

/* Rows and columns of the matrix to one scale of a copy. */
static void gmm__gtp_scale_per(gmm_scaling scaling, gmm_direction direction, int64_t per[2]) {
    const int64_t block = scaling == GMM_SCALING_MX32 ? 32 : scaling == GMM_SCALING_NV16 ? 16 : 128;
    per[0] = per[1] = scaling == GMM_SCALING_128X128 ? 128 : 1;
    per[direction == GMM_ROWWISE] = block;
}

/* The arrays of the side's copy, as memory has them: scales padded. */
static gmm_status gmm__gtp_arrays(gmm__gtp_planner *p, gmm__gtp_side *side, gmm_direction direction) {
    const gmm_shard *s = &side->shard;
    const gmm_direction d = s->scaling == GMM_SCALING_NONE ? GMM_ROWWISE : direction;
    gmm__gtp_array *data = &side->array[GMM__GTP_DATA], *scale = &side->array[GMM__GTP_SCALE];
    gmm_layout l = GMM_ZERO;
    gmm_error why = GMM_ZERO;
    const gmm_status status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, d, side->plan.shard_rows,
                                            side->plan.local_cols, &l, &why);
    const int64_t pack = gmm_dtype_bits(s->dtype) < 8 ? 8 / gmm_dtype_bits(s->dtype) : 1;
    int64_t unused = 0;
    int lead;
    if (status) return gmm__gtp_refuse(p, status, GMM_CKPT_DTYPE, "%.300s", why.text);
    memset(side->array, 0, sizeof side->array);
    data->dtype = s->dtype;
    data->shape[0] = l.data_rows;
    data->shape[1] = l.data_cols;
    data->lead = lead = l.transposed;
    data->per[lead] = 1;
    data->per[!lead] = pack;
    data->extent[lead] = l.data_rows;
    data->extent[!lead] = l.data_cols / pack;
    data->step[lead] = data->extent[!lead];
    data->step[!lead] = 1;
    if (s->scaling == GMM_SCALING_NONE) return GMM_OK;
    scale->dtype = l.scale_dtype;
    if (s->scaling == GMM_SCALING_TENSOR) {
        scale->dtype = GMM_F32;
        scale->shape[0] = scale->shape[1] = 1;
        return GMM_OK;
    }
    gmm__gtp_scale_per(s->scaling, d, scale->per);
    scale->lead = lead = !gmm__gtp_scale_axis(s->scaling, (int)d, &unused);
    scale->shape[0] = l.scale_rows;
    scale->shape[1] = l.scale_cols;
    scale->extent[lead] = l.scale_rows;
    scale->extent[!lead] = l.scale_cols;
    scale->step[lead] = l.scale_cols;
    scale->step[!lead] = 1;
    return GMM_OK;
}

/* Takes an array for one without padding. */
static void gmm__gtp_unpad(const gmm__gtp_side *side, gmm__gtp_array *a) {
    a->extent[0] = gmm__ceil_div(side->plan.shard_rows, a->per[0]);
    a->extent[1] = gmm__ceil_div(side->plan.local_cols, a->per[1]);
    a->shape[0] = a->extent[a->lead];
    a->shape[1] = a->step[a->lead] = a->extent[!a->lead];
}

/* Opens a side; `which` of the extents' room it takes. */
static gmm_status gmm__gtp_open_side(gmm__gtp_planner *p, const gmm_shard *shard, gmm_direction direction, int which,
                                     gmm__gtp_side *side) {
    gmm_error why = GMM_ZERO;
    gmm_status status = gmm__gtp_solve(p->fn, shard, &side->shard, &side->plan, &why);
    if (status) {
        const size_t skip = strlen(p->fn) + 2; /* the name comes again */
        return gmm__gtp_refuse(p, status, GMM_CKPT_ARGUMENT, "%.300s", strlen(why.text) > skip ? why.text + skip : "");
    }
    side->shard.struct_size = 0;
    status = gmm_gtp_extents(&side->shard, NULL, 0, &side->count, NULL);
    if (!status && side->count > p->room[which]) {
        gmm__gtp_free(p, p->extents[which]);
        p->room[which] = 0;
        p->extents[which] = (gmm_extent *)gmm__gtp_alloc(p, (size_t)side->count * sizeof *side->extents);
        if (!p->extents[which]) return gmm__gtp_refuse(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
        p->room[which] = side->count;
    }
    side->extents = p->extents[which];
    if (!status && side->count)
        status = gmm_gtp_extents(&side->shard, side->extents, side->count, &side->count, NULL);
    return status ? status : gmm__gtp_arrays(p, side, direction);
}

static gmm_status gmm__gtp_push(gmm__gtp_planner *p, const gmm_ckpt_move *m) {
    if (p->move_count == p->move_room) {
        const size_t room = p->move_room ? 2 * p->move_room : 64;
        gmm_ckpt_move *more = (gmm_ckpt_move *)gmm__gtp_alloc(p, room * sizeof *more);
        if (!more) return gmm__gtp_refuse(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
        if (p->move_count) memcpy(more, p->moves, p->move_count * sizeof *more);
        gmm__gtp_free(p, p->moves);
        p->moves = more;
        p->move_room = room;
    }
    p->moves[p->move_count++] = *m;
    return GMM_OK;
}

/* Units of a box along one axis: where they begin, and how many. 0 if a boundary cuts one: only the end of everything
   may lie inside. */
static int gmm__gtp_units(int64_t at, int64_t length, int64_t all, int64_t per, int64_t *first, int64_t *count) {
    *first = at / per;
    *count = gmm__ceil_div(length, per);
    return at % per == 0 && (length % per == 0 || at + length == all);
}

/* Moves one box of an array: rows at src[0] and dst[0] of the two sides, columns at src[1] and dst[1]. */
static gmm_status gmm__gtp_box(gmm__gtp_planner *p, const gmm_gtp_stored *from, const gmm__gtp_side *s,
                               const gmm__gtp_side *d, int32_t target, int part, const int64_t src[2],
                               const int64_t dst[2], const int64_t length[2]) {
    const gmm__gtp_array *a = &s->array[part], *b = &d->array[part];
    const int64_t all[2][2] = {{s->plan.valid_rows, s->plan.local_cols}, {d->plan.valid_rows, d->plan.local_cols}};
    gmm_ckpt_move m = GMM_ZERO;
    int k;
    m.kind = part == GMM__GTP_SCALE || a->dtype == b->dtype ? GMM_CKPT_COPY : GMM_CKPT_CONVERT;
    if (s->shard.scaling != d->shard.scaling) {
        m.kind = GMM_CKPT_DEQUANT;
        m.scaling = s->shard.scaling;
    }
    m.part = from->part;
    m.src = part == GMM__GTP_DATA ? from->data : from->scale;
    m.scale = m.kind == GMM_CKPT_DEQUANT ? from->scale : -1;
    m.dst = target;
    m.loops = 2;
    for (k = 0; k < 2; k++) {
        int64_t begin[2], count[2];
        if (!gmm__gtp_units(src[k], length[k], all[0][k], a->per[k], &begin[0], &count[0]) ||
            !gmm__gtp_units(dst[k], length[k], all[1][k], b->per[k], &begin[1], &count[1]))
            return gmm__gtp_refuse(p, GMM_E_CONFIG, GMM_CKPT_NOT_DIVISIBLE, "%lld %s from %lld of what is stored to "
                                   "%lld of the target cut blocks of %lld in %s: import into 16 bits, and quantize",
                                   (long long)length[k], k ? "columns" : "rows", (long long)src[k], (long long)dst[k],
                                   (long long)a->per[k], gmm_scaling_name(s->shard.scaling));
        m.src_at += begin[0] * a->step[k];
        m.dst_at += begin[1] * b->step[k];
        m.count[k] = count[1];
        m.src_step[k] = a->step[k];
        m.dst_step[k] = b->step[k];
    }
    return gmm__gtp_push(p, &m);
}

/* Zeros what lies behind the valid units of a target: whole rows of units, then the rest of the others. */
static gmm_status gmm__gtp_zeros(gmm__gtp_planner *p, const gmm__gtp_side *d, int32_t target, int part) {
    const gmm__gtp_array *a = &d->array[part];
    const int64_t used[2] = {gmm__ceil_div(d->plan.valid_rows, a->per[0]),
                             gmm__ceil_div(d->plan.local_cols, a->per[1])};
    int k, l;
    for (k = 0; k < 2; k++) {
        gmm_ckpt_move m = GMM_ZERO;
        gmm_status status;
        m.kind = GMM_CKPT_ZERO;
        m.src = m.scale = -1;
        m.dst = target;
        m.dst_at = used[k] * a->step[k];
        m.loops = 2;
        for (l = 0; l < 2; l++) {
            m.count[l] = l == k ? a->extent[l] - used[l] : k == 0 ? a->extent[l] : used[l];
            m.dst_step[l] = a->step[l];
        }
        if (m.count[0] < 1 || m.count[1] < 1) continue;
        status = gmm__gtp_push(p, &m);
        if (status) return status;
    }
    return GMM_OK;
}

/* Whether two shards are of one weight, as far as rows and columns go. */
static int gmm__gtp_same_weight(const gmm_shard *a, const gmm_shard *b) {
    int32_t i;
    if (a->rows != b->rows || a->cols != b->cols || a->sections != b->sections) return 0;
    for (i = 0; i < a->sections; i++)
        if (a->section_rows[i] != b->section_rows[i]) return 0;
    return 1;
}

/* Checks one stored shard against its tensors and the target. */
static gmm_status gmm__gtp_check_stored(gmm__gtp_planner *p, const gmm_gtp_item *item, int32_t j, gmm__gtp_side *s,
                                        const gmm__gtp_side *d) {
    const gmm_gtp_stored *x = &item->stored[j];
    const gmm_scaling scaling = s->shard.scaling;
    const int dequant = scaling != d->shard.scaling;
    const gmm_ckpt_tensor *t;
    int64_t n = 0;
    int part;
    if (!gmm__gtp_same_weight(&s->shard, &d->shard))
        return gmm__gtp_refuse(p, GMM_E_KEY, GMM_CKPT_SHAPE, "stored[%d] is of a weight of %lld x %lld in %d sections, "
                               "not of %lld x %lld in %d with these rows", j, (long long)s->shard.rows,
                               (long long)s->shard.cols, s->shard.sections, (long long)d->shard.rows,
                               (long long)d->shard.cols, (int)d->shard.sections);
    if (dequant ? scaling != GMM_SCALING_128X128 || d->shard.scaling != GMM_SCALING_NONE || item->direction
                : scaling != GMM_SCALING_NONE && s->shard.dtype != d->shard.dtype)
        return gmm__gtp_refuse(p, GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[%d] is %s %s, which does not become %s %s by "
                               "copies: import into 16 bits, and quantize", j, gmm_dtype_name(s->shard.dtype),
                               gmm_scaling_name(scaling), gmm_dtype_name(d->shard.dtype),
                               gmm_scaling_name(d->shard.scaling));
    if (x->reserved || x->part < 0 || x->part >= p->part_count)
        return gmm__gtp_refuse(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[%d]: part %d of %d, reserved %d: must be in "
                               "range, and 0", j, (int)x->part, p->part_count, (int)x->reserved);
    for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
        gmm__gtp_array *a = &s->array[part];
        const int32_t index = part == GMM__GTP_DATA ? x->data : x->scale;
        int64_t units = 1;
        int32_t k;
        if (part == GMM__GTP_SCALE && scaling == GMM_SCALING_NONE) break;
        t = gmm_ckpt_table_tensors(p->parts[x->part].table, &n);
        if (index < 0 || index >= n)
            return gmm__gtp_refuse(p, part == GMM__GTP_SCALE && index < 0 ? GMM_E_KEY : GMM_E_ARG,
                                   part == GMM__GTP_SCALE && index < 0 ? GMM_CKPT_SCALE_MISSING : GMM_CKPT_ARGUMENT,
                                   "stored[%d].%s is %d: part %d has %lld tensors", j, part ? "scale" : "data",
                                   (int)index, (int)x->part, (long long)n);
        t += index;
        if (t->dtype != a->dtype)
            return gmm__gtp_refuse(p, GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[%d]: \"%.60s\" is %s, its shard %s", j,
                                   t->name, gmm_dtype_name(t->dtype), gmm_dtype_name(a->dtype));
        for (k = 0; k < t->rank; k++) units *= t->shape[k];
        if (scaling == GMM_SCALING_TENSOR && part == GMM__GTP_SCALE && units == 1) continue;
        if (part == GMM__GTP_SCALE && scaling != GMM_SCALING_TENSOR &&
            (t->rank != 2 || t->shape[0] != a->shape[0] || t->shape[1] != a->shape[1]))
            gmm__gtp_unpad(s, a);
        if (t->rank != 2 || t->shape[0] != a->shape[0] || t->shape[1] != a->shape[1])
            return gmm__gtp_refuse(p, GMM_E_KEY, GMM_CKPT_SHAPE, "stored[%d]: \"%.60s\" is not [%lld, %lld], as its "
                                   "shard %d of %d, TP %d of %d, has it", j, t->name, (long long)a->shape[0],
                                   (long long)a->shape[1], s->shard.gtp_rank, s->shard.gtp_size,
                                   s->shard.tp_rank, s->shard.tp_size);
        if (dequant && part == GMM__GTP_SCALE && a->shape[1] != gmm__ceil_div(s->plan.local_cols, 128))
            return gmm__gtp_refuse(p, GMM_E_CONFIG, GMM_CKPT_NOT_DIVISIBLE, "stored[%d]: scales with padded columns "
                                   "cannot be dequantized: export them first", j);
    }
    return GMM_OK;
}

/* All that one stored shard has of the target; *moved counts elements. */
static gmm_status gmm__gtp_meet(gmm__gtp_planner *p, const gmm_gtp_stored *from, const gmm__gtp_side *s,
                                const gmm__gtp_side *d, int32_t target, int64_t *moved) {
    const int scaled = d->shard.scaling != GMM_SCALING_NONE;
    const int64_t c0 = s->plan.col0 > d->plan.col0 ? s->plan.col0 : d->plan.col0;
    const int64_t send = s->plan.col0 + s->plan.local_cols, dend = d->plan.col0 + d->plan.local_cols;
    int64_t src[2], dst[2], length[2];
    int32_t i, j;
    int part;
    length[1] = (send < dend ? send : dend) - c0;
    if (length[1] <= 0) return GMM_OK;
    src[1] = c0 - s->plan.col0;
    dst[1] = c0 - d->plan.col0;
    for (i = 0; i < d->count; i++)
        for (j = 0; j < s->count; j++) {
            const gmm_extent *a = &s->extents[j], *b = &d->extents[i];
            const int64_t begin = a->begin > b->begin ? a->begin : b->begin, end = a->end < b->end ? a->end : b->end;
            if (a->section != b->section || begin >= end) continue;
            src[0] = a->shard_row + begin - a->begin;
            dst[0] = b->shard_row + begin - b->begin;
            length[0] = end - begin;
            *moved += length[0] * length[1];
            for (part = GMM__GTP_DATA; part <= (scaled ? GMM__GTP_SCALE : GMM__GTP_DATA); part++) {
                gmm_status status;
                if (part == GMM__GTP_SCALE && d->shard.scaling == GMM_SCALING_TENSOR) break;
                status = gmm__gtp_box(p, from, s, d, target + part, part, src, dst, length);
                if (status) return status;
            }
        }
    return GMM_OK;
}

static gmm_status gmm__gtp_plan_item(gmm__gtp_planner *p, const gmm_gtp_item *item, int64_t index) {
    gmm__gtp_side d, s, first;
    gmm_shard whole;
    gmm_status status;
    int32_t j, k, target = (int32_t)p->target_count;
    int64_t moved = 0;
    int part, scaled, scale_moved = 0;
    memset(&d, 0, sizeof d);
    memset(&first, 0, sizeof first);
    p->key = item->name;
    if (!item->name || !item->shard || !item->stored || item->stored_count < 1 || (int)item->direction < GMM_ROWWISE ||
        item->direction > GMM_COLUMNWISE)
        return gmm__gtp_refuse(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[%lld]: name, shard and stored must be given, "
                               "stored_count %d be >= 1, direction %d a gmm_direction", (long long)index,
                               (int)item->stored_count, (int)item->direction);
    status = gmm__gtp_open_side(p, item->shard, item->direction, 0, &d);
    if (!status && p->exports) { /* the logical weight */
        whole = d.shard;
        whole.tp_size = whole.gtp_size = 1;
        whole.tp_rank = whole.gtp_rank = 0;
        status = gmm__gtp_open_side(p, &whole, item->direction, 0, &d);
        if (!status && d.shard.scaling > GMM_SCALING_TENSOR) gmm__gtp_unpad(&d, &d.array[GMM__GTP_SCALE]);
    }
    if (status) return status;
    scaled = d.shard.scaling != GMM_SCALING_NONE;
    if (!item->scale_name != !scaled)
        return gmm__gtp_refuse(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[%lld].scale_name is %s: %s has %s scales",
                               (long long)index, item->scale_name ? "given" : "NULL",
                               gmm_scaling_name(d.shard.scaling), scaled ? "" : "no");
    for (part = GMM__GTP_DATA; part <= scaled; part++) {
        gmm_ckpt_tensor *t = &p->targets[p->target_count++];
        memset(t, 0, sizeof *t);
        t->name = part ? item->scale_name : item->name;
        t->dtype = d.array[part].dtype;
        t->rank = 2;
        memcpy(t->shape, d.array[part].shape, sizeof d.array[part].shape);
    }
    for (j = 0; j < item->stored_count && !status; j++) {
        const gmm_gtp_stored *x = &item->stored[j];
        status = gmm__gtp_open_side(p, x->shard, item->direction, 1, &s);
        if (!status) status = gmm__gtp_check_stored(p, item, j, &s, &d);
        if (status) return status;
        if (j == 0) first = s;
        if (s.shard.tp_cut != first.shard.tp_cut || s.shard.tp_size != first.shard.tp_size ||
            s.shard.gtp_size != first.shard.gtp_size || s.plan.shard_rows != first.plan.shard_rows)
            return gmm__gtp_refuse(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[%d] is cut over TP %d, GTP %d into %lld "
                                   "rows, stored[0] over %d, %d into %lld: must be alike", j,
                                   s.shard.tp_size, s.shard.gtp_size, (long long)s.plan.shard_rows,
                                   first.shard.tp_size, first.shard.gtp_size,
                                   (long long)first.plan.shard_rows);
        for (k = 0; k < j; k++) { /* the same rows and columns, from before */
            const gmm_shard *o = item->stored[k].shard;
            if (o->gtp_rank == s.shard.gtp_rank && (s.shard.tp_cut == GMM_TP_WHOLE || o->tp_rank == s.shard.tp_rank))
                break;
        }
        if (k < j) continue;
        if (d.shard.scaling == GMM_SCALING_TENSOR && !scale_moved &&
            (!p->exports || (s.shard.gtp_rank == 0 && (s.shard.tp_rank == 0 || s.shard.tp_cut == GMM_TP_WHOLE)))) {
            gmm_ckpt_move m = GMM_ZERO;
            m.kind = GMM_CKPT_COPY;
            m.part = x->part;
            m.src = x->scale;
            m.dst = target + GMM__GTP_SCALE;
            m.scale = -1;
            m.loops = 1;
            m.count[0] = m.src_step[0] = m.dst_step[0] = 1;
            status = gmm__gtp_push(p, &m);
            scale_moved = 1;
        }
        if (!status) status = gmm__gtp_meet(p, x, &s, &d, target, &moved);
    }
    if (status || p->exports) return status;
    if (moved != d.plan.valid_rows * d.plan.local_cols)
        return gmm__gtp_refuse(p, GMM_E_KEY, GMM_CKPT_MISSING_INDEX, "what is stored holds %lld of the %lld elements "
                               "of shard %d of %d, TP %d of %d: a rank's part is missing", (long long)moved,
                               (long long)(d.plan.valid_rows * d.plan.local_cols), d.shard.gtp_rank,
                               d.shard.gtp_size, d.shard.tp_rank, d.shard.tp_size);
    for (part = GMM__GTP_DATA; part <= scaled && !status; part++)
        if (part == GMM__GTP_DATA || d.shard.scaling != GMM_SCALING_TENSOR)
            status = gmm__gtp_zeros(p, &d, target + part, part);
    return status;
}

static gmm_status gmm__gtp_checkpoint(const char *fn, int exports, gmm_ckpt_plan **out, const gmm_ckpt_part *parts,
                                      int32_t part_count, const gmm_gtp_item *items, int64_t count,
                                      const gmm_allocator *allocator, gmm_ckpt_report *report) {
    gmm__gtp_planner p;
    gmm_status status = GMM_OK;
    int64_t i;
    memset(&p, 0, sizeof p);
    if (report) memset(report, 0, sizeof *report);
    p.fn = fn;
    p.exports = exports;
    p.parts = parts;
    p.part_count = part_count;
    p.report = report;
    if (out) *out = NULL;
    if (!out || !parts || (!items && count))
        return gmm__gtp_refuse(&p, GMM_E_NULL, GMM_CKPT_ARGUMENT, "%s is NULL", !out ? "out" : !parts ? "parts"
                                                                                                  : "items");
    if (part_count < 1 || count < 0 || count > INT32_MAX / 2)
        return gmm__gtp_refuse(&p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "part_count %d, count %lld: must be >= 1, and 0 to "
                               "2^30 - 1", part_count, (long long)count);
    if (allocator && !allocator->alloc != !allocator->release)
        return gmm__gtp_refuse(&p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "allocator: both functions or none");
    for (i = 0; i < part_count; i++)
        if (!parts[i].table)
            return gmm__gtp_refuse(&p, GMM_E_NULL, GMM_CKPT_ARGUMENT, "parts[%lld].table is NULL", (long long)i);
    if (allocator) p.allocator = *allocator;
    p.targets = (gmm_ckpt_tensor *)gmm__gtp_alloc(&p, (size_t)(2 * count + 1) * sizeof *p.targets);
    if (!p.targets) return gmm__gtp_refuse(&p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
    for (i = 0; i < count && !status; i++) status = gmm__gtp_plan_item(&p, &items[i], i);
    if (!status)
        status = gmm_ckpt_plan_of_moves(out, parts, part_count, p.targets, p.target_count, p.moves,
                                        (int64_t)p.move_count, exports, allocator, report);
    gmm__gtp_free(&p, p.targets);
    gmm__gtp_free(&p, p.moves);
    gmm__gtp_free(&p, p.extents[0]);
    gmm__gtp_free(&p, p.extents[1]);
    return status;
}

GMMDEF gmm_status gmm_gtp_export(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report) {
    return gmm__gtp_checkpoint("gmm_gtp_export", 1, out, parts, part_count, items, count, allocator, report);
}
GMMDEF gmm_status gmm_gtp_import(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report) {
    return gmm__gtp_checkpoint("gmm_gtp_import", 0, out, parts, part_count, items, count, allocator, report);
}

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */

