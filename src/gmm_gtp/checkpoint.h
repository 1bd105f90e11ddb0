/* Plans that move shards to and from checkpoints. */
/* ......................................................................................... Checkpoints: moves ... */

/* Layout of one array of a copy: an element stands for a block of block[0] rows and block[1] columns of the matrix.
   Strides are in elements; extents count blocks, padding included. */
typedef struct gmm__gtp_array {
    gmm_dtype dtype;
    int32_t major;    /* axis of the matrix that the rows of the array follow: 0 = rows, 1 = columns */
    int64_t block[2], stride[2], extent[2];
    int64_t shape[2]; /* of its tensor */
} gmm__gtp_array;

/* Source or target of an item: the shard with its defaults, its plan, extents and arrays. */
typedef struct gmm__gtp_side {
    gmm_shard shard;
    gmm_shard_plan plan;
    gmm__gtp_array array[2]; /* [DATA, SCALE] */
    gmm_extent *extents;
    int32_t count;
} gmm__gtp_side;

typedef struct gmm__gtp_planner {
    const char *fn;
    const char *key;             /* name of the item being planned; NULL = none */
    int exports;
    const gmm_ckpt_part *parts;
    int32_t part_count;
    gmm_allocator allocator;
    gmm_ckpt_report *report;
    gmm_ckpt_tensor *targets;
    int64_t target_count;
    gmm_ckpt_move *moves;
    size_t move_count, move_capacity;
    gmm_extent *extents[2];      /* of the target, of the stored shard */
    int32_t capacity[2];
} gmm__gtp_planner;

static gmm_status gmm__gtp_ckpt_fail(gmm__gtp_planner *p, gmm_status status, gmm_ckpt_reason reason, const char *format,
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

/* Rows and columns of the matrix in a block with one scale. */
static void gmm__gtp_scale_block(gmm_scaling scaling, gmm_direction direction, int64_t shape[2]) {
    const int64_t block = scaling == GMM_SCALING_MX32 ? 32 : scaling == GMM_SCALING_NV16 ? 16 : 128;
    shape[0] = shape[1] = scaling == GMM_SCALING_128X128 ? 128 : 1;
    shape[direction == GMM_ROWWISE] = block;
}

/* The arrays of a side's copy as they are in memory: scales are padded. */
static gmm_status gmm__gtp_arrays(gmm__gtp_planner *p, gmm__gtp_side *side, gmm_direction direction) {
    const gmm_shard *s = &side->shard;
    const gmm_direction d = s->scaling == GMM_SCALING_NONE ? GMM_ROWWISE : direction;
    gmm__gtp_array *data = &side->array[GMM__GTP_DATA], *scale = &side->array[GMM__GTP_SCALE];
    gmm_layout l = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    const gmm_status status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, d, side->plan.shard_rows,
                                            side->plan.local_cols, &l, &error);
    const int64_t pack = gmm_dtype_bits(s->dtype) < 8 ? 8 / gmm_dtype_bits(s->dtype) : 1;
    int64_t unused = 0;
    int major;
    if (status) return gmm__gtp_ckpt_fail(p, status, GMM_CKPT_DTYPE, "%.300s", error.text);
    memset(side->array, 0, sizeof side->array);
    data->dtype = s->dtype;
    data->shape[0] = l.data_rows;
    data->shape[1] = l.data_cols;
    data->major = major = l.transposed;
    data->block[major] = 1;
    data->block[!major] = pack;
    data->extent[major] = l.data_rows;
    data->extent[!major] = l.data_cols / pack;
    data->stride[major] = data->extent[!major];
    data->stride[!major] = 1;
    if (s->scaling == GMM_SCALING_NONE) return GMM_OK;
    scale->dtype = l.scale_dtype;
    if (s->scaling == GMM_SCALING_TENSOR) {
        scale->dtype = GMM_F32;
        scale->shape[0] = scale->shape[1] = 1;
        return GMM_OK;
    }
    gmm__gtp_scale_block(s->scaling, d, scale->block);
    scale->major = major = !gmm__gtp_scale_axis(s->scaling, (int)d, &unused);
    scale->shape[0] = l.scale_rows;
    scale->shape[1] = l.scale_cols;
    scale->extent[major] = l.scale_rows;
    scale->extent[!major] = l.scale_cols;
    scale->stride[major] = l.scale_cols;
    scale->stride[!major] = 1;
    return GMM_OK;
}

/* Removes the padding from the description of an array. */
static void gmm__gtp_unpad(const gmm__gtp_side *side, gmm__gtp_array *a) {
    a->extent[0] = gmm__ceil_div(side->plan.shard_rows, a->block[0]);
    a->extent[1] = gmm__ceil_div(side->plan.local_cols, a->block[1]);
    a->shape[0] = a->extent[a->major];
    a->shape[1] = a->stride[a->major] = a->extent[!a->major];
}

/* Describes a side; its extents are stored in p->extents[buffer]. stored: the index of its shard in the item's
   `stored`; -1: it is the item's own. */
static gmm_status gmm__gtp_read_side(gmm__gtp_planner *p, const gmm_shard *shard, int32_t stored,
                                     gmm_direction direction, int buffer, gmm__gtp_side *side) {
    gmm_error error = GMM_ZERO;
    char owner[32] = "";
    gmm_status status = gmm__gtp_plan_shard(p->fn, shard, &side->shard, &side->plan, &error);
    if (status) {
        const size_t skip = strlen(p->fn) + 2; /* gmm__gtp_ckpt_fail writes the name again */
        if (stored >= 0) (void)snprintf(owner, sizeof owner, "stored[%d].", stored);
        return gmm__gtp_ckpt_fail(p, status, GMM_CKPT_ARGUMENT, "%s%.300s", owner,
                                  strlen(error.text) > skip ? error.text + skip : "");
    }
    side->shard.struct_size = 0;
    status = gmm_gtp_extents(&side->shard, NULL, 0, &side->count, NULL);
    if (!status && side->count > p->capacity[buffer]) {
        gmm__gtp_free(p, p->extents[buffer]);
        p->capacity[buffer] = 0;
        p->extents[buffer] = (gmm_extent *)gmm__gtp_alloc(p, (size_t)side->count * sizeof *side->extents);
        if (!p->extents[buffer]) return gmm__gtp_ckpt_fail(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
        p->capacity[buffer] = side->count;
    }
    side->extents = p->extents[buffer];
    if (!status && side->count)
        status = gmm_gtp_extents(&side->shard, side->extents, side->count, &side->count, NULL);
    return status ? status : gmm__gtp_arrays(p, side, direction);
}

static gmm_status gmm__gtp_add_move(gmm__gtp_planner *p, const gmm_ckpt_move *m) {
    if (p->move_count == p->move_capacity) {
        const size_t capacity = p->move_capacity ? 2 * p->move_capacity : 64;
        gmm_ckpt_move *more = (gmm_ckpt_move *)gmm__gtp_alloc(p, capacity * sizeof *more);
        if (!more) return gmm__gtp_ckpt_fail(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
        if (p->move_count) memcpy(more, p->moves, p->move_count * sizeof *more);
        gmm__gtp_free(p, p->moves);
        p->moves = more;
        p->move_capacity = capacity;
    }
    p->moves[p->move_count++] = *m;
    return GMM_OK;
}

/* First block and number of blocks of a box along one axis. Returns 0 if a boundary of the box cuts a block; only the
   last block of the axis may be partial. */
static int gmm__gtp_block_range(int64_t begin, int64_t length, int64_t all, int64_t block, int64_t *first,
                                int64_t *count) {
    *first = begin / block;
    *count = gmm__ceil_div(length, block);
    return begin % block == 0 && (length % block == 0 || begin + length == all);
}

/* Rows and columns that two sides have in common: index 0 is rows, 1 columns. */
typedef struct gmm__gtp_overlap {
    const gmm_gtp_stored *stored;
    const gmm__gtp_side *source, *target;
    int32_t target_index; /* of the target's elements; its scales follow */
    int64_t src[2], dst[2], length[2];
} gmm__gtp_overlap;

/* Adds the move of one array of an overlap. */
static gmm_status gmm__gtp_move_box(gmm__gtp_planner *p, const gmm__gtp_overlap *o, int part) {
    const gmm__gtp_side *s = o->source, *d = o->target;
    const gmm__gtp_array *a = &s->array[part], *b = &d->array[part];
    const int64_t all[2][2] = {{s->plan.valid_rows, s->plan.local_cols}, {d->plan.valid_rows, d->plan.local_cols}};
    gmm_ckpt_move m = GMM_ZERO;
    int k;
    m.kind = part == GMM__GTP_SCALE || a->dtype == b->dtype ? GMM_CKPT_COPY : GMM_CKPT_CONVERT;
    if (s->shard.scaling != d->shard.scaling) {
        m.kind = GMM_CKPT_DEQUANT;
        m.scaling = s->shard.scaling;
    }
    m.part = o->stored->part;
    m.src = part == GMM__GTP_DATA ? o->stored->data : o->stored->scale;
    m.scale = m.kind == GMM_CKPT_DEQUANT ? o->stored->scale : -1;
    m.dst = o->target_index + part;
    m.loops = 2;
    for (k = 0; k < 2; k++) {
        int64_t begin[2], count[2];
        if (!gmm__gtp_block_range(o->src[k], o->length[k], all[0][k], a->block[k], &begin[0], &count[0]) ||
            !gmm__gtp_block_range(o->dst[k], o->length[k], all[1][k], b->block[k], &begin[1], &count[1]))
            return gmm__gtp_ckpt_fail(p, GMM_E_CONFIG, GMM_CKPT_NOT_DIVISIBLE, "%lld %s from %lld of what is stored to "
                                      "%lld of the target cut blocks of %lld in %s: import into 16 bits, and quantize",
                                      (long long)o->length[k], k ? "columns" : "rows", (long long)o->src[k],
                                      (long long)o->dst[k],
                                      (long long)a->block[k], gmm_scaling_name(s->shard.scaling));
        m.src_at += begin[0] * a->stride[k];
        m.dst_at += begin[1] * b->stride[k];
        m.count[k] = count[1];
        m.src_step[k] = a->stride[k];
        m.dst_step[k] = b->stride[k];
    }
    return gmm__gtp_add_move(p, &m);
}

/* Zeros the padding of a target: the rows behind the valid ones, then the columns behind those of the valid rows. */
static gmm_status gmm__gtp_zero_padding(gmm__gtp_planner *p, const gmm__gtp_side *d, int32_t target, int part) {
    const gmm__gtp_array *a = &d->array[part];
    const int64_t used[2] = {gmm__ceil_div(d->plan.valid_rows, a->block[0]),
                             gmm__ceil_div(d->plan.local_cols, a->block[1])};
    int k, l;
    for (k = 0; k < 2; k++) {
        gmm_ckpt_move m = GMM_ZERO;
        gmm_status status;
        m.kind = GMM_CKPT_ZERO;
        m.src = m.scale = -1;
        m.dst = target;
        m.dst_at = used[k] * a->stride[k];
        m.loops = 2;
        for (l = 0; l < 2; l++) {
            m.count[l] = l == k ? a->extent[l] - used[l] : k == 0 ? a->extent[l] : used[l];
            m.dst_step[l] = a->stride[l];
        }
        if (m.count[0] < 1 || m.count[1] < 1) continue;
        status = gmm__gtp_add_move(p, &m);
        if (status) return status;
    }
    return GMM_OK;
}

/* Whether two shards belong to weights of the same rows, columns and sections. */
static int gmm__gtp_same_weight(const gmm_shard *a, const gmm_shard *b) {
    const int32_t n = a->sections ? a->sections : 1; /* 0: one section, as section_rows is NULL */
    int32_t i;
    if (a->rows != b->rows || a->cols != b->cols || n != (b->sections ? b->sections : 1)) return 0;
    for (i = 0; n > 1 && i < n; i++)
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
        return gmm__gtp_ckpt_fail(p, GMM_E_KEY, GMM_CKPT_SHAPE,
                                  "stored[%d] is of a weight of %lld x %lld in %d sections, "
                                  "not of %lld x %lld in %d with these rows", j, (long long)s->shard.rows,
                                  (long long)s->shard.cols, s->shard.sections, (long long)d->shard.rows,
                                  (long long)d->shard.cols, (int)d->shard.sections);
    if (dequant ? scaling != GMM_SCALING_128X128 || d->shard.scaling != GMM_SCALING_NONE || item->direction
        : scaling != GMM_SCALING_NONE && s->shard.dtype != d->shard.dtype)
        return gmm__gtp_ckpt_fail(p, GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[%d] is %s %s, which does not become %s %s by "
                                  "copies: import into 16 bits, and quantize", j, gmm_dtype_name(s->shard.dtype),
                                  gmm_scaling_name(scaling), gmm_dtype_name(d->shard.dtype),
                                  gmm_scaling_name(d->shard.scaling));
    if (x->reserved || x->part < 0 || x->part >= p->part_count)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[%d]: part %d of %d, reserved %d: must be in "
                                  "range, and 0", j, (int)x->part, p->part_count, (int)x->reserved);
    for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
        gmm__gtp_array *a = &s->array[part];
        const int32_t index = part == GMM__GTP_DATA ? x->data : x->scale;
        int32_t k, single = 1;
        if (part == GMM__GTP_SCALE && scaling == GMM_SCALING_NONE) break;
        t = gmm_ckpt_table_tensors(p->parts[x->part].table, &n);
        if (index < 0 || index >= n)
            return gmm__gtp_ckpt_fail(p, part == GMM__GTP_SCALE && index < 0 ? GMM_E_KEY : GMM_E_ARG,
                                      part == GMM__GTP_SCALE && index < 0 ? GMM_CKPT_SCALE_MISSING : GMM_CKPT_ARGUMENT,
                                      "stored[%d].%s is %d: part %d has %lld tensors", j, part ? "scale" : "data",
                                      (int)index, (int)x->part, (long long)n);
        t += index;
        if (t->dtype != a->dtype)
            return gmm__gtp_ckpt_fail(p, GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[%d]: \"%.60s\" is %s, its shard %s", j,
                                      t->name, gmm_dtype_name(t->dtype), gmm_dtype_name(a->dtype));
        for (k = 0; k < t->rank; k++) single &= t->shape[k] == 1;
        if (scaling == GMM_SCALING_TENSOR && part == GMM__GTP_SCALE && single) continue;
        if (part == GMM__GTP_SCALE && scaling != GMM_SCALING_TENSOR &&
            (t->rank != 2 || t->shape[0] != a->shape[0] || t->shape[1] != a->shape[1]))
            gmm__gtp_unpad(s, a);
        if (t->rank != 2 || t->shape[0] != a->shape[0] || t->shape[1] != a->shape[1])
            return gmm__gtp_ckpt_fail(p, GMM_E_KEY, GMM_CKPT_SHAPE, "stored[%d]: \"%.60s\" is not [%lld, %lld], as its "
                                      "shard %d of %d, TP %d of %d, has it", j, t->name, (long long)a->shape[0],
                                      (long long)a->shape[1], s->shard.gtp_rank, s->shard.gtp_size,
                                      s->shard.tp_rank, s->shard.tp_size);
        if (dequant && part == GMM__GTP_SCALE && a->shape[1] != gmm__ceil_div(s->plan.local_cols, 128))
            return gmm__gtp_ckpt_fail(p, GMM_E_CONFIG, GMM_CKPT_NOT_DIVISIBLE, "stored[%d]: scales with padded columns "
                                      "cannot be dequantized: export them first", j);
    }
    return GMM_OK;
}

/* Adds the moves of everything that a stored shard has in common with the target; *moved counts its elements. */
static gmm_status gmm__gtp_move_overlap(gmm__gtp_planner *p, const gmm_gtp_stored *stored, const gmm__gtp_side *s,
                                        const gmm__gtp_side *d, int32_t target, int64_t *moved) {
    const int scaled = d->shard.scaling != GMM_SCALING_NONE;
    const int64_t col0 = s->plan.col0 > d->plan.col0 ? s->plan.col0 : d->plan.col0;
    const int64_t source_end = s->plan.col0 + s->plan.local_cols;
    const int64_t target_end = d->plan.col0 + d->plan.local_cols;
    gmm__gtp_overlap o;
    int32_t i, j;
    int part;
    o.stored = stored;
    o.source = s;
    o.target = d;
    o.target_index = target;
    o.length[1] = (source_end < target_end ? source_end : target_end) - col0;
    if (o.length[1] <= 0) return GMM_OK;
    o.src[1] = col0 - s->plan.col0;
    o.dst[1] = col0 - d->plan.col0;
    for (i = 0; i < d->count; i++)
        for (j = 0; j < s->count; j++) {
            const gmm_extent *a = &s->extents[j], *b = &d->extents[i];
            const int64_t begin = a->begin > b->begin ? a->begin : b->begin, end = a->end < b->end ? a->end : b->end;
            if (a->section != b->section || begin >= end) continue;
            o.src[0] = a->shard_row + begin - a->begin;
            o.dst[0] = b->shard_row + begin - b->begin;
            o.length[0] = end - begin;
            *moved += o.length[0] * o.length[1];
            for (part = GMM__GTP_DATA; part <= (scaled ? GMM__GTP_SCALE : GMM__GTP_DATA); part++) {
                gmm_status status;
                if (part == GMM__GTP_SCALE && d->shard.scaling == GMM_SCALING_TENSOR) break;
                status = gmm__gtp_move_box(p, &o, part);
                if (status) return status;
            }
        }
    return GMM_OK;
}

static gmm_status gmm__gtp_plan_item(gmm__gtp_planner *p, const gmm_gtp_item *item, int64_t index) {
    gmm__gtp_side d, s, first;
    gmm_shard logical;
    gmm_status status;
    int32_t j, k, target = (int32_t)p->target_count;
    int64_t moved = 0;
    int part, scaled, scale_moved = 0;
    memset(&d, 0, sizeof d);
    memset(&first, 0, sizeof first);
    p->key = item->name;
    if (!item->name || !item->shard || !item->stored || item->stored_count < 1 || (int)item->direction < GMM_ROWWISE ||
        item->direction > GMM_COLUMNWISE)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[%lld]: name, shard and stored must be given, "
                                  "stored_count %d be >= 1, direction %d a gmm_direction", (long long)index,
                                  (int)item->stored_count, (int)item->direction);
    status = gmm__gtp_read_side(p, item->shard, -1, item->direction, 0, &d);
    if (!status && p->exports) { /* the target is the logical weight */
        logical = d.shard;
        logical.tp_size = logical.gtp_size = 1;
        logical.tp_rank = logical.gtp_rank = 0;
        status = gmm__gtp_read_side(p, &logical, -1, item->direction, 0, &d);
        if (!status && d.shard.scaling > GMM_SCALING_TENSOR) gmm__gtp_unpad(&d, &d.array[GMM__GTP_SCALE]);
    }
    if (status) return status;
    scaled = d.shard.scaling != GMM_SCALING_NONE;
    if (!item->scale_name != !scaled)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[%lld].scale_name is %s: %s has %s scales",
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
        status = gmm__gtp_read_side(p, x->shard, j, item->direction, 1, &s);
        if (!status) status = gmm__gtp_check_stored(p, item, j, &s, &d);
        if (status) return status;
        if (j == 0) first = s;
        if (s.shard.tp_cut != first.shard.tp_cut || s.shard.tp_size != first.shard.tp_size ||
            s.shard.gtp_size != first.shard.gtp_size || s.plan.shard_rows != first.plan.shard_rows)
            return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[%d] is cut over TP %d, GTP %d into %lld "
                                      "rows, stored[0] over %d, %d into %lld: must be alike", j,
                                      s.shard.tp_size, s.shard.gtp_size, (long long)s.plan.shard_rows,
                                      first.shard.tp_size, first.shard.gtp_size,
                                      (long long)first.plan.shard_rows);
        for (k = 0; k < j; k++) { /* an earlier stored shard may hold the same rows and columns */
            const gmm_shard *earlier = item->stored[k].shard;
            if (earlier->gtp_rank == s.shard.gtp_rank &&
                (s.shard.tp_cut == GMM_TP_WHOLE || earlier->tp_rank == s.shard.tp_rank))
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
            status = gmm__gtp_add_move(p, &m);
            scale_moved = 1;
        }
        if (!status) status = gmm__gtp_move_overlap(p, x, &s, &d, target, &moved);
    }
    if (status || p->exports) return status;
    if (moved != d.plan.valid_rows * d.plan.local_cols)
        return gmm__gtp_ckpt_fail(p, GMM_E_KEY, GMM_CKPT_MISSING_INDEX,
                                  "what is stored holds %lld of the %lld elements "
                                  "of shard %d of %d, TP %d of %d: a rank's part is missing", (long long)moved,
                                  (long long)(d.plan.valid_rows * d.plan.local_cols), d.shard.gtp_rank,
                                  d.shard.gtp_size, d.shard.tp_rank, d.shard.tp_size);
    for (part = GMM__GTP_DATA; part <= scaled && !status; part++)
        if (part == GMM__GTP_DATA || d.shard.scaling != GMM_SCALING_TENSOR)
            status = gmm__gtp_zero_padding(p, &d, target + part, part);
    return status;
}

/* Checks the parts and plans the items with a planner that has its function, direction, parts, and report. */
static gmm_status gmm__gtp_plan_items(gmm__gtp_planner *p, const gmm_gtp_item *items, int64_t count,
                                      const gmm_allocator *allocator, gmm_ckpt_plan **out) {
    static const char of_moves[] = "gmm_ckpt_plan_of_moves";
    gmm_status status = GMM_OK;
    int64_t i;
    if (p->report) memset(p->report, 0, sizeof *p->report);
    if (out) *out = NULL;
    if (!out || !p->parts || (!items && count))
        return gmm__gtp_ckpt_fail(p, GMM_E_NULL, GMM_CKPT_ARGUMENT, "%s is NULL",
                                  !out ? "out" : !p->parts ? "parts" : "items");
    if (p->part_count < 1 || count < 0 || count > INT32_MAX / 2)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "part_count %d, count %lld: must be >= 1, and 0 to "
                                  "2^30 - 1", p->part_count, (long long)count);
    if (allocator && !allocator->alloc != !allocator->release)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "allocator: both functions or none");
    for (i = 0; i < p->part_count; i++)
        if (!p->parts[i].table)
            return gmm__gtp_ckpt_fail(p, GMM_E_NULL, GMM_CKPT_ARGUMENT, "parts[%lld].table is NULL", (long long)i);
    if (allocator) p->allocator = *allocator;
    p->targets = (gmm_ckpt_tensor *)gmm__gtp_alloc(p, (size_t)(2 * count + 1) * sizeof *p->targets);
    if (!p->targets) return gmm__gtp_ckpt_fail(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
    for (i = 0; i < count && !status; i++) status = gmm__gtp_plan_item(p, &items[i], i);
    if (!status)
        status = gmm_ckpt_plan_of_moves(out, p->parts, p->part_count, p->targets, p->target_count, p->moves,
                                        (int64_t)p->move_count, p->exports, allocator, p->report);
    if (status && p->report && !strncmp(p->report->error.text, of_moves, sizeof of_moves - 1)) {
        const gmm_error inner = p->report->error; /* its message is to name the function that the caller called */
        (void)gmm__fail(&p->report->error, inner.status, "%s%s", p->fn, inner.text + sizeof of_moves - 1);
    }
    gmm__gtp_free(p, p->targets);
    gmm__gtp_free(p, p->moves);
    gmm__gtp_free(p, p->extents[0]);
    gmm__gtp_free(p, p->extents[1]);
    return status;
}

static gmm__gtp_planner gmm__gtp_planner_make(const char *fn, int exports, const gmm_ckpt_part *parts,
                                              int32_t part_count, gmm_ckpt_report *report) {
    gmm__gtp_planner p;
    memset(&p, 0, sizeof p);
    p.fn = fn;
    p.exports = exports;
    p.parts = parts;
    p.part_count = part_count;
    p.report = report;
    return p;
}

GMMDEF gmm_status gmm_gtp_export(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report) {
    gmm__gtp_planner p = gmm__gtp_planner_make("gmm_gtp_export", 1, parts, part_count, report);
    return gmm__gtp_plan_items(&p, items, count, allocator, out);
}
GMMDEF gmm_status gmm_gtp_import(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report) {
    gmm__gtp_planner p = gmm__gtp_planner_make("gmm_gtp_import", 0, parts, part_count, report);
    return gmm__gtp_plan_items(&p, items, count, allocator, out);
}

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */

