#ifndef GMM_NO_QUANT
/* --- CPU engine: tiles of 128 rows of one group or matrix by 128 columns --- */

enum {
    GMM__QUANT_OFFSETS, GMM__QUANT_STARTS, /* [units + 1] rows of the source, and padded rows */
    GMM__QUANT_AMAX,                       /* [2][units]: of the rowwise and of the columnwise copy */
    GMM__QUANT_STRIPS,                     /* [2][strips]: the same by strip */
    GMM__QUANT_LINES, GMM__QUANT_COLUMNS,  /* amax of each row (ROW, row_amax) and of each column (ROW) */
    GMM__QUANT_SCRATCH
};

typedef struct gmm__quant_scratch {
    float x[GMM_TILE * GMM_TILE], xt[GMM_TILE * GMM_TILE];
    uint32_t scale[GMM_TILE * GMM_TILE_BLOCKS];
    uint8_t code[GMM_TILE * GMM_TILE];
} gmm__quant_scratch;

typedef struct gmm__quant_job {
    const gmm__call *call;
    const int64_t *offsets, *starts;
    float *amax[2], *strips[2], *row_amax, *col_amax;
    gmm__quant_scratch *scratch;
    int64_t units, strip_count, col_tiles;
    gmm__cpu_index index; /* of gathered rows of the source */
} gmm__quant_job;

/* A strip of a unit (a group or a matrix) of `rows` rows: its rows [row, row + m), at most GMM_TILE. */
typedef struct gmm__strip { int64_t unit, row, m, rows; } gmm__strip;

static gmm__strip gmm__strip_of(const gmm__quant_job *job, int64_t index) {
    gmm__strip s;
    s.unit = gmm__cpu_find_group(job->starts, job->units, index * GMM_TILE);
    s.row = index * GMM_TILE - job->starts[s.unit];
    s.rows = job->offsets[s.unit + 1] - job->offsets[s.unit];
    s.m = gmm__min_i64(s.rows - s.row, GMM_TILE);
    return s;
}
/* View of unit u of a quantized matrix. */
static gmm__qview gmm__quant_view(const gmm__quant_job *job, const gmm_mat *m, gmm_direction direction, int64_t u) {
    const int grouped = gmm__grouped(job->call);
    return gmm__qview_of(m, direction, grouped, u, grouped ? job->offsets[u] : 0, grouped ? job->starts[u] : 0,
                         job->offsets[u + 1] - job->offsets[u], job->call->in);
}

/* n elements of a row of a unit as fp32; a quantized source is dequantized. */
static void gmm__quant_load(const gmm__quant_job *job, const gmm__strip *s, int64_t row, int64_t col, int64_t n,
                            float *dst) {
    const gmm_mat *m = &job->call->mat[GMM__SOURCE];
    const int grouped = gmm__grouped(job->call);
    if (m->scaling == GMM_SCALING_NONE) {
        const int64_t at = gmm__cpu_indexed_row(&job->index, (grouped ? job->offsets[s->unit] : 0) + row);
        if (at < 0) memset(dst, 0, (size_t)n * sizeof *dst);
        else gmm__row_load(m->dtype, gmm__at(m, grouped ? 0 : s->unit, at, col), dst, n);
    } else {
        const gmm__qview v = gmm__quant_view(job, m, GMM_ROWWISE, s->unit);
        gmm__qview_load(&v, row, col, n, 1, dst);
    }
}

/* Loads a tile of a strip, with zeros past the ends of the strip and of the columns. */
static void gmm__quant_tile_load(const gmm__quant_job *job, const gmm__strip *s, int64_t col, int64_t n, float *x) {
    int64_t r;
    memset(x, 0, sizeof(float) * GMM_TILE * GMM_TILE);
    for (r = 0; r < s->m; r++) gmm__quant_load(job, s, s->row + r, col, n, x + r * GMM_TILE);
}
/* Transposes a tile, and applies the Hadamard transform of the columnwise copy. */
static void gmm__quant_tile_transpose(const gmm_format *f, const float *x, int64_t n, float *xt) {
    int64_t r, c;
    for (c = 0; c < n; c++) {
        for (r = 0; r < GMM_TILE; r++) xt[c * GMM_TILE + r] = x[r * GMM_TILE + c];
        if (f->hadamard)
            for (r = 0; r < GMM_TILE; r += 16) gmm_hadamard16(xt + c * GMM_TILE + r, (uint32_t)f->hadamard & 0xFFFFu);
    }
}
static uint32_t gmm__quant_amax(const float *x, int64_t n, uint32_t amax) {
    int64_t i;
    for (i = 0; i < n; i++) amax = gmm_amax_bits(amax, x[i]);
    return amax;
}

/* Amaxes of a strip for both copies, and of its rows. */
static void gmm__quant_strip_amax(const void *arg, int64_t index, int32_t thread) {
    const gmm__quant_job *job = (const gmm__quant_job *)arg;
    const gmm__call *call = job->call;
    const gmm_format *f = &call->format;
    const gmm__strip s = gmm__strip_of(job, index);
    gmm__quant_scratch *w = &job->scratch[thread];
    uint32_t row_amax[GMM_TILE] = { 0 }, all = 0, columnwise_amax = 0;
    int64_t r, c0;
    for (c0 = 0; c0 < call->in; c0 += GMM_TILE) {
        const int64_t n = gmm__min_i64(call->in - c0, GMM_TILE);
        gmm__quant_tile_load(job, &s, c0, n, w->x);
        for (r = 0; r < s.m; r++) row_amax[r] = gmm__quant_amax(w->x + r * GMM_TILE, n, row_amax[r]);
        if (f->hadamard && call->mat[GMM__COLUMNWISE_COPY].dtype != GMM_NONE) {
            gmm__quant_tile_transpose(f, w->x, n, w->xt);
            columnwise_amax = gmm__quant_amax(w->xt, n * GMM_TILE, columnwise_amax);
        }
    }
    for (r = 0; r < s.m; r++) {
        if (row_amax[r] > all) all = row_amax[r];
        if (job->row_amax)
            job->row_amax[(gmm__grouped(call) ? job->offsets[s.unit] : s.unit * s.rows) + s.row + r] =
                gmm_f32_from_bits(row_amax[r]);
    }
    job->strips[0][index] = gmm_f32_from_bits(all);
    job->strips[1][index] = gmm_f32_from_bits(f->hadamard ? columnwise_amax : all);
}

/* Amax of up to 128 columns of one unit. */
static void gmm__quant_column_amax(const void *arg, int64_t index, int32_t thread) {
    const gmm__quant_job *job = (const gmm__quant_job *)arg;
    const int64_t u = index / job->col_tiles, c0 = index % job->col_tiles * GMM_TILE;
    const int64_t n = gmm__min_i64(job->call->in - c0, GMM_TILE), rows = job->offsets[u + 1] - job->offsets[u];
    uint32_t amax[GMM_TILE] = { 0 };
    float x[GMM_TILE];
    gmm__strip s;
    int64_t r, c;
    (void)thread;
    s.unit = u;
    for (r = 0; r < rows; r++) {
        gmm__quant_load(job, &s, r, c0, n, x);
        for (c = 0; c < n; c++) amax[c] = gmm_amax_bits(amax[c], x[c]);
    }
    for (c = 0; c < n; c++) job->col_amax[u * job->call->in + c0 + c] = gmm_f32_from_bits(amax[c]);
}

/* Stores the codes of a tile at line l0 and element a0, and the scales of its blocks with their padding. */
static void gmm__quant_store(const gmm__qview *v, int64_t l0, int64_t a0, int64_t lines, int64_t data_lines,
                             int64_t along, const gmm__quant_scratch *w) {
    const int width = gmm_block_along(v->scaling);
    int64_t l, a, j;
    for (l = 0; l < data_lines && !v->mn_major; l++) {
        const uint8_t *code = w->code + l * GMM_TILE;
        uint8_t *dst = v->data + (v->dtype == GMM_E2M1 ? ((l0 + l) * v->ld + a0) / 2 : (l0 + l) * v->ld + a0);
        if (v->dtype != GMM_E2M1) memcpy(dst, code, (size_t)along);
        else for (a = 0; a < along; a += 2) dst[a / 2] = (uint8_t)(code[a] | code[a + 1] << 4);
    }
    for (a = 0; a < along && v->mn_major; a++) {
        uint8_t *dst = v->data + (v->dtype == GMM_E2M1 ? ((a0 + a) * v->ld + l0) / 2 : (a0 + a) * v->ld + l0);
        if (v->dtype != GMM_E2M1) for (l = 0; l < lines; l++) dst[l] = w->code[l * GMM_TILE + a];
        else
            for (l = 0; l < lines; l += 2)
                dst[l / 2] = (uint8_t)(w->code[l * GMM_TILE + a] | w->code[(l + 1) * GMM_TILE + a] << 4);
    }
    if (width == 128) {
        float *scale = (float *)(void *)v->scale;
        if (v->scaling == GMM_SCALING_128X128) {
            const int64_t first = a0 / 128, used = gmm__ceil_div(v->along, 128), end = gmm__round_up(used, 4);
            scale[gmm__qview_scale(v, l0, first)] = gmm_f32_from_bits(w->scale[0]);
            if (first + 1 == used)
                for (j = used; j < end; j++) scale[gmm__qview_scale(v, l0, j)] = 0.0f;
        } else
            for (l = 0; l < gmm__min_i64(GMM_TILE, gmm__round_up(v->lines, 4) - l0); l++)
                scale[gmm__qview_scale(v, l0 + l, a0 / 128)] =
                    l < lines ? gmm_f32_from_bits(w->scale[l * GMM_TILE_BLOCKS]) : 0.0f;
    } else if (width) {
        const int64_t first = a0 / width, used = gmm__ceil_div(v->along, width), end = gmm__round_up(used, 4);
        for (l = 0; l < GMM_TILE; l++)
            for (j = 0; j < gmm__min_i64(GMM_TILE / width, end - first); j++)
                v->scale[gmm__qview_scale(v, l0 + l, first + j)] =
                    l < lines && first + j < used ? (uint8_t)w->scale[l * GMM_TILE_BLOCKS + j] : (uint8_t)0;
    }
}

/* Loads one tile and quantizes it along its rows, its columns or both. */
static void gmm__quant_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__quant_job *job = (const gmm__quant_job *)arg;
    const gmm__call *call = job->call;
    const gmm_format *f = &call->format;
    const gmm_quantization *d = &call->d.quant;
    const gmm_mat *rowwise = &call->mat[GMM__ROWWISE_COPY], *columnwise = &call->mat[GMM__COLUMNWISE_COPY];
    const int grouped = gmm__grouped(call), width = gmm_block_along(f->scaling);
    const gmm__strip s = gmm__strip_of(job, index / job->col_tiles);
    const int64_t c0 = index % job->col_tiles * GMM_TILE, n = gmm__min_i64(call->in - c0, GMM_TILE);
    gmm__quant_scratch *w = &job->scratch[thread];
    gmm_tile t = GMM_ZERO;

    gmm__quant_tile_load(job, &s, c0, n, w->x);
    t.format = f;
    t.source = call->mat[GMM__SOURCE].scaling == GMM_SCALING_NONE ? call->mat[GMM__SOURCE].dtype : GMM_F32;
    t.scale = d->scale ? d->scale[s.unit] : 1.0f;
    t.group = d->first_group + s.unit;
    if (f->stochastic) {
        t.seed = d->random[0];
        t.offset = d->random[1];
    }
    if (rowwise->dtype != GMM_NONE) {
        const gmm__qview v = gmm__quant_view(job, rowwise, GMM_ROWWISE, s.unit);
        memset(w->code, 0, sizeof w->code);
        memset(w->scale, 0, sizeof w->scale);
        t.direction = GMM_ROWWISE;
        t.lines = (int)s.m;
        t.along = (int)n;
        t.x = w->x;
        t.amax_per_line = job->row_amax != NULL;
        t.amax = job->row_amax ? job->row_amax + (grouped ? job->offsets[s.unit] : s.unit * s.rows) + s.row
                            : job->amax[0] + s.unit;
        t.blocks_per_line = width ? gmm__ceil_div(call->in, width) : 1;
        t.first_block = s.row * t.blocks_per_line + (width ? c0 / width : 0);
        gmm_quantize_tile(&t, w->code, w->scale);
        gmm__quant_store(&v, s.row, c0, s.m, s.m, n, w);
        if (f->scaling == GMM_SCALING_ROW && c0 == 0) {
            int64_t r;
            for (r = 0; r < s.m; r++)
                ((float *)(void *)v.scale)[s.row + r] = gmm_f32_from_bits(w->scale[r * GMM_TILE_BLOCKS]);
        }
    }
    if (columnwise->dtype != GMM_NONE) {
        const gmm__qview v = gmm__quant_view(job, columnwise, GMM_COLUMNWISE, s.unit);
        /* a padded copy has whole tiles: rows past the group are zeros, or mixed with its last rows by the transform */
        const int64_t along = grouped ? (int64_t)GMM_TILE : s.m;
        memset(w->code, 0, sizeof w->code);
        memset(w->scale, 0, sizeof w->scale);
        gmm__quant_tile_transpose(f, w->x, n, w->xt);
        t.direction = GMM_COLUMNWISE;
        t.lines = (int)n;
        t.along = (int)along;
        t.x = w->xt;
        t.amax_per_line = job->col_amax != NULL;
        t.amax = job->col_amax ? job->col_amax + s.unit * call->in + c0 : job->amax[1] + s.unit;
        t.blocks_per_line = width ? gmm__ceil_div(s.rows, width) : 1;
        t.first_block = c0 * t.blocks_per_line + (width ? s.row / width : 0);
        gmm_quantize_tile(&t, w->code, w->scale);
        gmm__quant_store(&v, c0, s.row, n, n, v.mn_major ? s.m : along, w);
    }
}

/* Work of a call over `rows` rows in `strips` strips, all of whose rows a padded columnwise copy has. Quantizing an
   element takes about as long as four copies. */
static double gmm__quant_work(const gmm__call *call, int64_t rows, int64_t strips) {
    const int padded = gmm__grouped(call) && call->mat[GMM__COLUMNWISE_COPY].dtype != GMM_NONE;
    return 4.0 * (double)call->in * (padded ? (double)strips * GMM_TILE : (double)rows);
}
/* Bytes of scratch for all threads of a call. */
static size_t gmm__quant_scratch_bytes(const gmm__call *call) {
    const int64_t strips = gmm__strips(call), tiles = strips * gmm__ceil_div(call->in, GMM_TILE);
    const int64_t rows = gmm__grouped(call) ? call->rows : call->units * call->rows;
    return (size_t)gmm__cpu_threads(call->ctx, tiles, gmm__quant_work(call, rows, strips)) * sizeof(gmm__quant_scratch);
}

static int gmm__cpu_plan_quantize(const gmm__call *call, gmm__plan *plan) {
    const gmm_format *f = &call->format;
    const size_t units = (size_t)gmm__units(call), strips = (size_t)gmm__strips(call);
    const size_t rows = (size_t)(gmm__grouped(call) ? call->rows : call->units * call->rows);
    const int by_row = f->scaling == GMM_SCALING_ROW;
    gmm__reserve(plan, GMM__QUANT_OFFSETS, (units + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__QUANT_STARTS, (units + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__QUANT_AMAX, 2 * units * sizeof(float));
    gmm__reserve(plan, GMM__QUANT_STRIPS, 2 * strips * sizeof(float));
    gmm__reserve(plan, GMM__QUANT_LINES, by_row || f->row_amax ? rows * sizeof(float) : 0);
    gmm__reserve(plan, GMM__QUANT_COLUMNS, by_row ? units * (size_t)call->in * sizeof(float) : 0);
    gmm__reserve(plan, GMM__QUANT_SCRATCH, gmm__quant_scratch_bytes(call));
    return 1;
}

/* Computes the offsets of units in rows of the source and in padded rows. Returns the live rows of a split. */
static int64_t gmm__quant_offsets(const gmm__call *call, int64_t *offsets, int64_t *starts) {
    const int64_t units = gmm__units(call);
    int64_t u, live = 0;
    if (gmm__grouped(call)) live = gmm__cpu_offsets(&call->groups, offsets);
    else for (u = 0; u <= units; u++) offsets[u] = u * call->rows;
    starts[0] = 0;
    for (u = 0; u < units; u++) starts[u + 1] = starts[u] + gmm_group_rows(offsets[u + 1] - offsets[u]);
    return live;
}

/* Zeroes the elements of an unpadded copy past the live rows. */
static void gmm__quant_tail(const gmm_mat *m, int64_t live, int64_t rows, int64_t cols) {
    int64_t r;
    for (r = live; r < rows; r++)
        if (m->dtype == GMM_E2M1) memset((char *)m->data + r * m->ld / 2, 0, (size_t)(cols / 2));
        else memset((char *)m->data + r * m->ld, 0, (size_t)cols);
}

static gmm_status gmm__cpu_launch_quantize(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_quantization *d = &call->d.quant;
    const gmm_format *f = &call->format;
    const gmm_mat *copy[2];
    gmm_linear source = GMM_ZERO; /* index of the gathered rows, for the cast and the bias gradient */
    int64_t *offsets = (int64_t *)gmm__region(plan, GMM__QUANT_OFFSETS);
    int64_t *starts = (int64_t *)gmm__region(plan, GMM__QUANT_STARTS);
    const int by_row = f->scaling == GMM_SCALING_ROW, tensor = f->scaling == GMM_SCALING_TENSOR;
    const int global = tensor || (f->scaling == GMM_SCALING_NV16 && !f->row_amax);
    gmm__quant_job job;
    double work;
    int64_t live, u, i;
    int k;

    (void)stream;
    if (d->skip && *d->skip) return GMM_OK;
    copy[0] = &call->mat[GMM__ROWWISE_COPY];
    copy[1] = &call->mat[GMM__COLUMNWISE_COPY];
    live = gmm__quant_offsets(call, offsets, starts);
    source.dy_index = d->src_index;
    source.index_rows = d->index_rows;
    source.index_div = d->index_div;
    memset(&job, 0, sizeof job);
    job.call = call;
    job.units = gmm__units(call);
    job.offsets = offsets;
    job.starts = starts;
    job.strip_count = starts[job.units] / GMM_TILE;
    job.col_tiles = gmm__ceil_div(call->in, GMM_TILE);
    job.index = gmm__cpu_index_of(&source, GMM__SOURCE);
    gmm__cpu_index_faults(&job.index, live, call->groups.fault);
    job.scratch = (gmm__quant_scratch *)gmm__region(plan, GMM__QUANT_SCRATCH);
    work = gmm__quant_work(call, offsets[job.units], job.strip_count);
    for (k = 0; k < 2; k++) {
        job.amax[k] = (float *)gmm__region(plan, GMM__QUANT_AMAX) + k * job.units;
        job.strips[k] = (float *)gmm__region(plan, GMM__QUANT_STRIPS) + k * gmm__strips(call);
    }
    if (by_row || f->row_amax) job.row_amax = (float *)gmm__region(plan, GMM__QUANT_LINES);
    if (by_row && copy[1]->dtype != GMM_NONE) job.col_amax = (float *)gmm__region(plan, GMM__QUANT_COLUMNS);

    if (d->phase == GMM_QUANT_CAST) {
        for (k = 0; k < 2; k++)
            if (copy[k]->dtype != GMM_NONE) memcpy(job.amax[k], copy[k]->amax, (size_t)job.units * sizeof(float));
        if (tensor && copy[0]->dtype != GMM_NONE) memcpy(job.amax[1], job.amax[0], (size_t)job.units * sizeof(float));
    } else if ((global && !(f->delayed && !copy[0]->amax && !copy[1]->amax)) || job.row_amax) {
        gmm__cpu_for(call->ctx, job.strip_count, work, gmm__quant_strip_amax, &job);
        for (k = 0; k < 2; k++)
            for (u = 0; u < job.units; u++) {
                uint32_t amax = 0;
                for (i = starts[u] / GMM_TILE; i < starts[u + 1] / GMM_TILE; i++)
                    amax = gmm_amax_bits(amax, job.strips[k][i]);
                if (f->delayed && copy[k]->amax) amax = gmm_amax_bits(amax, copy[k]->amax[u]);
                job.amax[k][u] = gmm_f32_from_bits(amax);
                if (global && copy[k]->dtype != GMM_NONE && copy[k]->amax) copy[k]->amax[u] = job.amax[k][u];
            }
        if (f->row_amax && copy[0]->amax) /* NULL without rows */
            memcpy(copy[0]->amax, job.row_amax, (size_t)(gmm__grouped(call) ? live : job.units * call->rows) *
                   sizeof(float));
        if (job.col_amax) gmm__cpu_for(call->ctx, job.units * job.col_tiles, work, gmm__quant_column_amax, &job);
        if (d->phase == GMM_QUANT_AMAX) return GMM_OK;
    }
    for (k = 0; k < 2 && tensor; k++)
        for (u = 0; u < job.units && copy[k]->dtype != GMM_NONE; u++) {
            const gmm__qview v = gmm__quant_view(&job, copy[k], k ? GMM_COLUMNWISE : GMM_ROWWISE, u);
            const float scale = f->delayed ? d->scale ? d->scale[u] : 1.0f
                                           : gmm_scale_from_amax(job.amax[k][u], gmm_dtype_largest(f->dtype),
                                                                 gmm_dtype_largest(GMM_F32), f->eps, f->pow2);
            *(float *)(void *)v.scale = gmm_scale_inverse(scale);
        }
    for (i = 0; job.col_amax && i < job.units * call->in; i++) {
        const gmm__qview v = gmm__quant_view(&job, copy[1], GMM_COLUMNWISE, i / call->in);
        ((float *)(void *)v.scale)[i % call->in] = gmm_scale_inverse(gmm_scale_from_amax(
            job.col_amax[i], gmm_dtype_largest(f->dtype), gmm_dtype_largest(GMM_F32), f->eps, f->pow2));
    }
    gmm__cpu_for(call->ctx, job.strip_count * job.col_tiles, work, gmm__quant_task, &job);
    if (gmm__grouped(call) && call->groups.tail == GMM_TAIL_ZERO)
        for (k = 0; k < 2; k++)
            if (copy[k]->dtype != GMM_NONE && (k == 0 || f->scaling == GMM_SCALING_MX32))
                gmm__quant_tail(copy[k], live, call->rows, call->in);
    if (d->db) gmm__cpu_bgrad(call, offsets, &source);
    return GMM_OK;
}

/* Dequantizes one tile. A columnwise copy is transposed in the scratch. */
static void gmm__dequant_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__quant_job *job = (const gmm__quant_job *)arg;
    const gmm__call *call = job->call;
    const gmm_direction direction = call->d.dequant.direction;
    const gmm_mat *dst = &call->mat[GMM__ROWWISE_COPY];
    const gmm__strip s = gmm__strip_of(job, index / job->col_tiles);
    const int64_t c0 = index % job->col_tiles * GMM_TILE, n = gmm__min_i64(call->in - c0, GMM_TILE);
    const gmm__qview v = gmm__quant_view(job, &call->mat[GMM__SOURCE], direction, s.unit);
    gmm__quant_scratch *w = &job->scratch[thread];
    const int grouped = gmm__grouped(call);
    int64_t r, c;
    if (direction == GMM_ROWWISE)
        for (r = 0; r < s.m; r++) gmm__qview_load(&v, s.row + r, c0, n, 1, w->x + r * GMM_TILE);
    else {
        for (c = 0; c < n; c++) gmm__qview_load(&v, c0 + c, s.row, s.m, 1, w->xt + c * GMM_TILE);
        for (r = 0; r < s.m; r++)
            for (c = 0; c < n; c++) w->x[r * GMM_TILE + c] = w->xt[c * GMM_TILE + r];
    }
    for (r = 0; r < s.m; r++)
        gmm__row_store(dst->dtype, gmm__at(dst, grouped ? 0 : s.unit,
                                           (grouped ? job->offsets[s.unit] : 0) + s.row + r, c0),
                       w->x + r * GMM_TILE, n);
}

static int gmm__cpu_plan_dequantize(const gmm__call *call, gmm__plan *plan) {
    const size_t units = (size_t)gmm__units(call);
    gmm__reserve(plan, GMM__QUANT_OFFSETS, (units + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__QUANT_STARTS, (units + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__QUANT_SCRATCH, gmm__quant_scratch_bytes(call));
    return 1;
}
static gmm_status gmm__cpu_launch_dequantize(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    int64_t *offsets = (int64_t *)gmm__region(plan, GMM__QUANT_OFFSETS);
    int64_t *starts = (int64_t *)gmm__region(plan, GMM__QUANT_STARTS);
    const int64_t live = gmm__quant_offsets(call, offsets, starts);
    gmm__quant_job job;
    (void)stream;
    memset(&job, 0, sizeof job);
    job.call = call;
    job.units = gmm__units(call);
    job.offsets = offsets;
    job.starts = starts;
    job.col_tiles = gmm__ceil_div(call->in, GMM_TILE);
    job.scratch = (gmm__quant_scratch *)gmm__region(plan, GMM__QUANT_SCRATCH);
    gmm__cpu_for(call->ctx, starts[job.units] / GMM_TILE * job.col_tiles,
                 gmm__quant_work(call, offsets[job.units], starts[job.units] / GMM_TILE), gmm__dequant_task, &job);
    if (gmm__grouped(call)) gmm__cpu_tail(&call->mat[GMM__ROWWISE_COPY], call->groups.tail, live, call->rows, call->in);
    return GMM_OK;
}

/* Transposes a tile of 128 x 128 in squares that stay in the L1 cache. */
static void gmm__transpose_task(const void *arg, int64_t index, int32_t thread) {
    enum { SIDE = 32 };
    const gmm__call *call = (const gmm__call *)arg;
    const int64_t row_tiles = gmm__ceil_div(call->rows, GMM_TILE), col_tiles = gmm__ceil_div(call->in, GMM_TILE);
    const int64_t u = index / (row_tiles * col_tiles), i = index / col_tiles % row_tiles, j = index % col_tiles;
    const gmm__qview src = gmm__qview_of(&call->mat[GMM__SOURCE], GMM_ROWWISE, 0, u, 0, 0, call->rows, call->in);
    const gmm__qview dst = gmm__qview_of(&call->mat[GMM__ROWWISE_COPY], GMM_COLUMNWISE, 0, u, 0, 0, call->rows,
                                         call->in);
    const int64_t r1 = gmm__min_i64(call->rows, (i + 1) * GMM_TILE), c1 = gmm__min_i64(call->in, (j + 1) * GMM_TILE);
    int64_t r0, c0, r, c;
    (void)thread;
    for (r0 = i * GMM_TILE; r0 < r1; r0 += SIDE)
        for (c0 = j * GMM_TILE; c0 < c1; c0 += SIDE)
            for (c = c0; c < gmm__min_i64(c1, c0 + SIDE); c++) {
                const int64_t end = gmm__min_i64(r1, r0 + SIDE);
                if (src.dtype == GMM_E2M1) /* rows are even: each line of the copy consists of whole bytes */
                    for (r = r0; r < end; r += 2)
                        dst.data[(c * dst.ld + r) / 2] =
                            (uint8_t)(gmm_nibble(src.data, r * src.ld + c) |
                                      gmm_nibble(src.data, (r + 1) * src.ld + c) << 4);
                else
                    for (r = r0; r < end; r++) dst.data[c * dst.ld + r] = src.data[r * src.ld + c];
            }
    if (src.scaling == GMM_SCALING_NV16) gmm__qview_transpose_nv16_scales(&src, &dst, i, j, 0, 1);
    else gmm__qview_transpose_scale(&src, &dst, i, j);
}
static gmm_status gmm__cpu_launch_transpose(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    (void)stream;
    gmm__cpu_for(call->ctx, call->units * gmm__ceil_div(call->rows, GMM_TILE) * gmm__ceil_div(call->in, GMM_TILE),
                 (double)call->units * (double)call->rows * (double)call->in, gmm__transpose_task, call);
    return GMM_OK;
}

static gmm_status gmm__cpu_launch_scale_update(const gmm__plan *plan, gmm_stream stream) {
    const gmm_scale_update *d = &plan->call->d.update;
    int32_t i;
    (void)stream;
    for (i = 0; i < d->slots; i++)
        d->scale[i] = gmm_delayed_scale(d->history + i, d->stride, d->history_length, gmm_dtype_largest(d->dtype),
                                        d->margin, d->most_recent, 0.0f, d->scale[i]);
    return GMM_OK;
}

static gmm_status gmm__cpu_launch_shard_cast(const gmm__plan *plan, gmm_stream stream) {
    const gmm__shard_args a = gmm__shard_of(plan->call);
    const int nv = a.format.scaling == GMM_SCALING_NV16;
    int64_t i, end, lines, blocks;
    int k;
    (void)stream;
    if (plan->call->d.shard.phase == GMM_QUANT_AMAX) {
        memset(a.amax, 0, (size_t)gmm__shard_floats(&a) * sizeof(float));
        for (i = 0; i < a.length; i++) {
            const int64_t e = a.start + i, member = e / (a.rows * a.cols), row = e / a.cols % a.rows, col = e % a.cols;
            const float v = gmm__shard_value(&a, i);
            for (k = 0; k < 2 + nv; k++)
                if (k == 2 || a.copy[k].dtype != GMM_NONE) {
                    float *dst = &a.amax[k == 2 ? member : gmm__shard_amax_at(&a, k, member, row, col)];
                    *dst = gmm_f32_from_bits(gmm_amax_bits(gmm_f32_bits(*dst), v));
                }
        }
        return GMM_OK;
    }
    for (k = 0; k < 2; k++) {
        if (a.copy[k].dtype == GMM_NONE) continue;
        gmm__shard_scales(&a, k, &lines, &blocks);
        for (i = 0; i < a.count * lines * blocks; i++) gmm__shard_store_scale(&a, k, i);
        gmm__shard_parts(&a, k, &i, &end);
        for (; i < end; i++) gmm__shard_store_part(&a, k, i);
    }
    return GMM_OK;
}
#endif /* GMM_NO_QUANT */

