/* Shard plans and extents. */

/* Rows of a scaling block, which no shard boundary may cut. */
static int64_t gmm__gtp_block_rows(gmm_scaling scaling) {
    return scaling == GMM_SCALING_NONE || scaling == GMM_SCALING_TENSOR ? 1 : gmm_gtp_unit(scaling);
}

GMMDEF int64_t gmm_gtp_unit(gmm_scaling scaling) {
    switch (scaling) {
    case GMM_SCALING_NONE:
    case GMM_SCALING_TENSOR:
    case GMM_SCALING_NV16: return 16;
    case GMM_SCALING_MX32: return 32;
    case GMM_SCALING_1X128:
    case GMM_SCALING_128X128: return 128;
    default: return 0;
    }
}

GMMDEF int64_t gmm_gtp_recipe_unit(gmm_recipe_kind recipe) {
    switch (recipe) {
    case GMM_RECIPE_NONE: return gmm_gtp_unit(GMM_SCALING_NONE);
    case GMM_RECIPE_FP8_DELAYED:
    case GMM_RECIPE_FP8_CURRENT: return gmm_gtp_unit(GMM_SCALING_TENSOR);
    case GMM_RECIPE_FP8_BLOCK: return gmm_gtp_unit(GMM_SCALING_128X128);
    case GMM_RECIPE_MXFP8: return gmm_gtp_unit(GMM_SCALING_MX32);
    case GMM_RECIPE_NVFP4: return gmm_gtp_unit(GMM_SCALING_NV16);
    default: return 0;
    }
}

/* Checks everything about a shard except its sections. */
static gmm_status gmm__gtp_check_shard(const char *fn, const gmm_shard *s, gmm_error *error) {
    const int64_t block = gmm__gtp_block_rows(s->scaling);
    if (gmm_gtp_unit(s->scaling) == 0)
        return gmm__fail(error, GMM_E_DTYPE, "%s: scaling %s (%d) is not sharded", fn, gmm_scaling_name(s->scaling),
                         (int)s->scaling);
    if (s->tp_cut != GMM_TP_WHOLE && s->tp_cut != GMM_TP_ROWS && s->tp_cut != GMM_TP_COLS)
        return gmm__fail(error, GMM_E_ARG, "%s: tp_cut is %d: must be a gmm_tp_cut", fn, (int)s->tp_cut);
    if (s->rows < 1 || s->cols < 1)
        return gmm__fail(error, GMM_E_ARG, "%s: weight of %lld x %lld: rows and cols must be >= 1", fn,
                         (long long)s->rows, (long long)s->cols);
    if (s->tp_rank < 0 || s->tp_rank >= s->tp_size)
        return gmm__fail(error, GMM_E_ARG, "%s: tp_rank %d of tp_size %d: must be in [0, size)", fn, (int)s->tp_rank,
                         (int)s->tp_size);
    if (s->gtp_rank < 0 || s->gtp_rank >= s->gtp_size)
        return gmm__fail(error, GMM_E_ARG, "%s: gtp_rank %d of gtp_size %d: must be in [0, size)", fn,
                         (int)s->gtp_rank, (int)s->gtp_size);
    if (s->sections < 0 || (s->sections > 0) != (s->section_rows != NULL))
        return gmm__fail(error, GMM_E_ARG, "%s: sections is %d and section_rows is %s: one needs the other", fn,
                         (int)s->sections, s->section_rows ? "given" : "NULL");
    if (s->tp_multiple < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: tp_multiple is %d: must be >= 0", fn, (int)s->tp_multiple);
    if (s->tp_cut == GMM_TP_COLS && s->cols % s->tp_size != 0)
        return gmm__fail(error, GMM_E_ARG, "%s: cols is %lld: must be a multiple of tp_size %d", fn,
                         (long long)s->cols, (int)s->tp_size);
    if (s->unit < GMM_GTP_UNPADDED)
        return gmm__fail(error, GMM_E_ARG, "%s: unit is %lld: must be > 0, 0 (the format's) or GMM_GTP_UNPADDED", fn,
                         (long long)s->unit);
    if (s->unit > 0 && s->unit % block != 0)
        return gmm__fail(error, GMM_E_CONFIG, "%s: unit is %lld: must be a multiple of %lld rows, a block of scaling "
                         "%s", fn, (long long)s->unit, (long long)block, gmm_scaling_name(s->scaling));
    return GMM_OK;
}

/* The rows that a TP rank has of `rows` rows of the whole weight. */
static int64_t gmm__gtp_tp_rows(const gmm_shard *s, int64_t rows) {
    return s->tp_cut == GMM_TP_ROWS ? rows / s->tp_size : rows;
}

/* Checks the sections of a shard. */
static gmm_status gmm__gtp_check_sections(const char *fn, const gmm_shard *s, gmm_error *error) {
    const int32_t n = s->sections ? s->sections : 1;
    int64_t remaining = s->rows;
    int32_t i;
    for (i = 0; i < n; i++) {
        const int64_t rows = s->sections ? s->section_rows[i] : s->rows;
        if (rows < 1)
            return gmm__fail(error, GMM_E_ARG, "%s: section_rows[%d] is %lld: must be >= 1", fn, i,
                             (long long)rows);
        if (rows > remaining || (i == n - 1 && rows < remaining))
            return gmm__fail(error, GMM_E_ARG, "%s: section_rows[%d] is %lld with %lld of rows %lld left: the sections "
                             "must add up to rows", fn, i, (long long)rows, (long long)remaining, (long long)s->rows);
        if (s->tp_cut == GMM_TP_ROWS && rows % s->tp_size != 0)
            return gmm__fail(error, GMM_E_ARG, "%s: section %d has %lld rows: must be a multiple of tp_size %d", fn,
                             i, (long long)rows, (int)s->tp_size);
        if (s->tp_cut == GMM_TP_ROWS && s->tp_multiple > 1 && rows / s->tp_size % s->tp_multiple != 0)
            return gmm__fail(error, GMM_E_CONFIG, "%s: section %d has %lld rows per TP rank: must be a multiple of "
                             "tp_multiple %d", fn, i, (long long)(rows / s->tp_size), (int)s->tp_multiple);
        remaining -= rows;
    }
    return GMM_OK;
}

/* Copies the shard, fills in its defaults, and computes its plan. */
static gmm_status gmm__gtp_plan_shard(const char *fn, const gmm_shard *desc, gmm_shard *s, gmm_shard_plan *p,
                                      gmm_error *error) {
    const gmm_shard_plan zero = GMM_ZERO;
    gmm_status status = gmm__gtp_read(fn, "shard", desc, s, sizeof *s, error);
    int64_t block, multiple = 0;
    int direction;
    if (status) return status;
    if (s->tp_size == 0) s->tp_size = 1;
    if (s->gtp_size == 0) s->gtp_size = 1;
    status = gmm__gtp_check_shard(fn, s, error);
    if (status) return status;
    status = gmm__gtp_check_sections(fn, s, error);
    if (status) return status;

    *p = zero;
    block = gmm__gtp_block_rows(s->scaling);
    p->unit = s->unit == GMM_GTP_UNPADDED ? 0 : s->unit ? s->unit : gmm_gtp_unit(s->scaling);
    p->local_rows = gmm__gtp_tp_rows(s, s->rows);
    p->local_cols = s->tp_cut == GMM_TP_COLS ? s->cols / s->tp_size : s->cols;
    p->col0 = s->tp_cut == GMM_TP_COLS ? s->tp_rank * p->local_cols : 0;
    if (s->scaling == GMM_SCALING_NV16 && p->local_rows % 2 != 0)
        return gmm__fail(error, GMM_E_ARG, "%s: %lld local rows: must be even for scaling nv16", fn,
                         (long long)p->local_rows);
    if (s->gtp_size > 1 && p->unit == 0) {
        if (p->local_rows % s->gtp_size != 0)
            return gmm__fail(error, GMM_E_CONFIG, "%s: unit is GMM_GTP_UNPADDED and gtp_size %d does not divide %lld "
                             "local rows: the rest would be lost", fn, s->gtp_size, (long long)p->local_rows);
        if (p->local_rows / s->gtp_size % block != 0)
            return gmm__fail(error, GMM_E_CONFIG, "%s: unit is GMM_GTP_UNPADDED and shards of %lld rows cut the "
                             "%lld-row blocks of scaling %s", fn, (long long)(p->local_rows / s->gtp_size),
                             (long long)block, gmm_scaling_name(s->scaling));
    } else if (s->gtp_size > 1) {
        if (!gmm__mul(p->unit, s->gtp_size, &multiple) || p->local_rows > INT64_MAX - multiple)
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: %lld local rows padded to unit %lld * gtp_size %d do not fit "
                             "64 bits", fn, (long long)p->local_rows, (long long)p->unit, s->gtp_size);
        p->pad = (multiple - p->local_rows % multiple) % multiple;
    }
    p->padded_rows = p->local_rows + p->pad;
    p->shard_rows = p->padded_rows / s->gtp_size;
    p->row0 = s->gtp_rank * p->shard_rows;
    p->valid_rows = p->local_rows - p->row0;
    p->valid_rows = p->valid_rows < 0 ? 0 : p->valid_rows > p->shard_rows ? p->shard_rows : p->valid_rows;

    for (direction = GMM_ROWWISE; direction <= GMM_COLUMNWISE; direction++) {
        const int columnwise = direction == GMM_COLUMNWISE;
        /* whether shards store the direction; other columnwise copies are transposed from gathered rowwise ones */
        const int stored = !columnwise || (gmm__gtp_block_rows(s->scaling) > 1 && s->scaling != GMM_SCALING_128X128);
        gmm_layout whole = GMM_ZERO, shard = GMM_ZERO;
        gmm_error layout_error = GMM_ZERO;
        if (columnwise && s->scaling == GMM_SCALING_NONE) continue;
        status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->padded_rows,
                               p->local_cols, &whole, &layout_error);
        if (!status && stored)
            status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->shard_rows,
                                   p->local_cols, &shard, &layout_error);
        if (status) return gmm__fail(error, status, "%s: %.400s", fn, layout_error.text);
        p->gather_data_bytes[direction] = whole.data_bytes;
        p->gather_scale_bytes[direction] = whole.scale_bytes;
        p->shard_data_bytes[direction] = shard.data_bytes;
        p->shard_scale_bytes[direction] = shard.scale_bytes;
    }
    return GMM_OK;
}

/* Which axis of a scale array runs along the rows of the weight (1: its rows, 0: its columns), and the number of rows
   that share a scale. */
static int gmm__gtp_scale_axis(gmm_scaling scaling, int direction, int64_t *block) {
    const int columnwise = direction == GMM_COLUMNWISE;
    switch (scaling) {
    case GMM_SCALING_1X128: *block = columnwise ? 128 : 1; return columnwise;
    case GMM_SCALING_MX32: *block = columnwise ? 32 : 1; return 1;
    case GMM_SCALING_NV16: *block = columnwise ? 16 : 1; return !columnwise;
    default: *block = 128; return !columnwise; /* 128X128 */
    }
}

/* Bytes of a shard's scales that its rank sends. Ranks agree on the scale of TENSOR beforehand, and where the scales of
   shards follow one another in those of the whole weight, padding behind a shard's is not sent. */
static int64_t gmm__gtp_sent_scale_bytes(gmm_scaling scaling, int direction, int64_t shard_rows,
                                         const gmm_layout *shard) {
    int64_t block = 1;
    if (scaling == GMM_SCALING_NONE || scaling == GMM_SCALING_TENSOR) return 0;
    if (!gmm__gtp_scale_axis(scaling, direction, &block)) return shard->scale_bytes;
    /* at most the bytes of the layout; bits might not fit */
    return shard_rows / block * shard->scale_cols * (gmm_dtype_bits(shard->scale_dtype) / 8);
}

GMMDEF gmm_status gmm_gtp_plan(const gmm_shard *shard, gmm_shard_plan *plan, gmm_error *error) {
    gmm_shard s;
    gmm_shard_plan p;
    gmm_status status = GMM_OK;
    const size_t common = gmm__gtp_common_size("gmm_gtp_plan", "plan", plan, sizeof *plan, &status, error);
    if (status) return status;
    status = gmm__gtp_plan_shard("gmm_gtp_plan", shard, &s, &p, error);
    if (status) return status;
    p.struct_size = plan->struct_size;
    memcpy(plan, &p, common);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_extents(const gmm_shard *shard, gmm_extent *extents, int32_t capacity, int32_t *count,
                                  gmm_error *error) {
    gmm_shard s;
    gmm_shard_plan p;
    int32_t i, n = 0, pass;
    gmm_status status;
    if (!count) return gmm__fail(error, GMM_E_NULL, "gmm_gtp_extents: count is NULL");
    if (capacity < 0)
        return gmm__fail(error, GMM_E_ARG, "gmm_gtp_extents: capacity is %d: must be >= 0", capacity);
    if (!extents && capacity > 0)
        return gmm__fail(error, GMM_E_NULL, "gmm_gtp_extents: extents is NULL with capacity %d", capacity);
    status = gmm__gtp_plan_shard("gmm_gtp_extents", shard, &s, &p, error);
    if (status) return status;
    for (pass = 0; pass < (extents ? 2 : 1); pass++) { /* count, then fill */
        int64_t logical0 = 0, local0 = 0; /* first row of the section: in the whole weight, in the local matrix */
        if (pass == 1 && n > capacity)
            return gmm__fail(error, GMM_E_WORKSPACE, "gmm_gtp_extents: capacity is %d: the shard has %d extents",
                             capacity, n);
        n = 0;
        for (i = 0; i < (s.sections ? s.sections : 1); i++) {
            const int64_t rows = s.sections ? s.section_rows[i] : s.rows, slice = gmm__gtp_tp_rows(&s, rows);
            const int64_t lo = local0 > p.row0 ? local0 : p.row0, last = p.row0 + p.valid_rows;
            const int64_t hi = local0 + slice < last ? local0 + slice : last;
            if (lo < hi) {
                if (pass == 1) {
                    gmm_extent x = GMM_ZERO;
                    x.section = i;
                    x.begin = (s.tp_cut == GMM_TP_ROWS ? s.tp_rank * slice : 0) + (lo - local0);
                    x.end = x.begin + (hi - lo);
                    x.logical_row = logical0 + x.begin;
                    x.shard_row = lo - p.row0;
                    extents[n] = x;
                }
                n++;
            }
            logical0 += rows;
            local0 += slice;
        }
    }
    *count = n;
    return GMM_OK;
}

