/* ................................................................................... 15.5 Boxes of a weight ... */
/* Shards of a logical array as boxes of halves, rows and columns, and the strided moves between two boxes. */

/* The logical array of one linear, state and kind: [experts][halves][f][k]; gate and up are halves. */
typedef struct gmm__ck_array {
    const gmm_ckpt_linear *linear;
    const char *state;
    gmm_ckpt_kind kind;
    int64_t experts, halves, f, k;
    int32_t grouped, rows_sharded, cols_sharded; /* grouped: EP distributes experts; sharded: by ETP */
    int32_t gtp_sharded;                         /* GTP can shard the rows */
    int32_t dims;                                /* of a matrix as it is stored: 2, 1 for a vector, 0 for one value */
    int32_t single;                              /* 1: one value of the whole matrix, in which gate and up are one */
    int32_t etp_part;                            /* >= 0: the ETP rank whose parts alone are read; -1 = all */
} gmm__ck_array;

/* Whether the elements of so many matrices can be counted in 63 bits, as bytes and as codes: an element has at most 8
   bytes, and a byte at most 2 codes. */
static int gmm__ck_fits(int64_t experts, int64_t rows, int64_t cols) {
    int64_t n;
    return gmm__mul(rows, cols, &n) && gmm__mul(n, experts, &n) && gmm__mul(n, 16, &n);
}

static gmm__ck_array gmm__ck_make_array(const gmm_ckpt_linear *l, gmm_ckpt_kind kind) {
    static const int8_t rules[][3] = {
#define GMM__X(name, value, text, grouped, rows, cols) {grouped, rows, cols},
        GMM_CKPT_SLOT_LIST(GMM__X)
#undef GMM__X
    };
    gmm__ck_array x;
    memset(&x, 0, sizeof x);
    x.linear = l;
    x.kind = kind;
    x.experts = l->experts;
    x.halves = l->gated ? 2 : 1;
    x.f = l->out / x.halves;
    x.k = l->in && kind != GMM_CKPT_BIAS ? l->in : 1;
    x.dims = l->in == 0 || kind == GMM_CKPT_BIAS ? 1 : 2;
    x.etp_part = -1;
    x.grouped = rules[l->slot][0];
    x.gtp_sharded = x.grouped && kind != GMM_CKPT_BIAS;
    x.rows_sharded = rules[l->slot][1];
    x.cols_sharded = kind == GMM_CKPT_BIAS ? 0 : rules[l->slot][2];
    return x;
}

/* The rows and columns of its array that a stored matrix holds, and the strides of its elements in its tensor. With
   both halves in it, row (h, i) of the matrix is (i / block) 2 block + i % block + h block. */
typedef struct gmm__ck_shard {
    int32_t part, tensor, scale;
    gmm_scaling scaling;
    gmm_dtype dtype;
    int64_t expert0, experts;   /* first expert, and how many the tensor holds */
    int64_t half0, halves;
    int64_t f0, f, k0, k;
    int64_t block;
    int64_t row0, rows;         /* stored rows of the matrix [row0, row0 + rows) */
    int64_t expert_step, row_step, col_step; /* elements */
} gmm__ck_shard;

/* A range of halves and a range of rows in each half. */
typedef struct gmm__ck_box { int64_t h0, h1, f0, f1; } gmm__ck_box;

/* Writes the rows of a shard as boxes, and returns their number, at most 5: part of a first group of gate and up
   blocks, whole groups, part of a last one. */
static int gmm__ck_row_boxes(const gmm__ck_shard *p, gmm__ck_box *box) {
    int64_t a = p->row0, end = p->row0 + p->rows;
    int n = 0;
    for (; a < end; n++) {
        const int64_t group = p->halves * p->block, within = a % group, base = a / group * p->block;
        int64_t length;
        if (within == 0 && end - a >= group) { /* whole groups */
            length = (end - a) / group;
            box[n].h0 = 0;
            box[n].h1 = p->halves;
            box[n].f0 = base;
            box[n].f1 = base + length * p->block;
            length *= group;
        } else {
            const int64_t h = within / p->block, t = within % p->block;
            length = gmm__min_i64(p->block - t, end - a);
            box[n].h0 = h;
            box[n].h1 = h + 1;
            box[n].f0 = base + t;
            box[n].f1 = base + t + length;
        }
        box[n].h0 += p->half0;
        box[n].h1 += p->half0;
        box[n].f0 += p->f0;
        box[n].f1 += p->f0;
        a += length;
    }
    return n;
}

/* Offset in the shard's tensor, in elements, of element (expert e, half h, row f, column k) of the whole array. */
static int64_t gmm__ck_element_offset(const gmm__ck_shard *p, int64_t e, int64_t h, int64_t f, int64_t k) {
    const int64_t i = f - p->f0;
    const int64_t row = i / p->block * p->block * p->halves + i % p->block + (h - p->half0) * p->block;
    return (e - p->expert0) * p->expert_step + (row - p->row0) * p->row_step + (k - p->k0) * p->col_step;
}

/* The block size where rows f0 to f1 do not have one constant stride; 0 if they do. */
static int64_t gmm__ck_row_block(const gmm__ck_shard *p, int64_t f0, int64_t f1) {
    if (p->halves == 1 || p->block == 1 || (f0 - p->f0) / p->block == (f1 - 1 - p->f0) / p->block) return 0;
    return p->block;
}

/* Stored rows from f to f + df: df a multiple of the block, or both rows in one. */
static int64_t gmm__ck_row_distance(const gmm__ck_shard *p, int64_t df, int even) {
    return p->halves == 2 && (p->block == 1 || !even) ? 2 * df : df;
}

/* Removes loops of count 1, sorts loops by falling dst_step, and merges neighbours that form one loop. */
static void gmm__ck_simplify_loops(gmm_ckpt_move *m) {
    int n = 0, i, j;
    for (i = 0; i < m->loops; i++) {
        if (m->count[i] == 1) continue;
        for (j = n++; j > 0 && m->dst_step[j - 1] < m->dst_step[i]; j--) {}
        if (j < n - 1 || i != n - 1) {
            const int64_t c = m->count[i], s = m->src_step[i], d = m->dst_step[i];
            int k;
            for (k = n - 1; k > j; k--) {
                m->count[k] = m->count[k - 1];
                m->src_step[k] = m->src_step[k - 1];
                m->dst_step[k] = m->dst_step[k - 1];
            }
            m->count[j] = c;
            m->src_step[j] = s;
            m->dst_step[j] = d;
        }
    }
    for (i = n - 1; i > 0; i--) {
        int64_t count, src, dst; /* of a move that is not checked yet they may not fit */
        if (!gmm__mul(m->count[i], m->src_step[i], &src) || !gmm__mul(m->count[i], m->dst_step[i], &dst) ||
            !gmm__mul(m->count[i - 1], m->count[i], &count) || m->src_step[i - 1] != src || m->dst_step[i - 1] != dst)
            continue;
        m->count[i - 1] = count;
        m->src_step[i - 1] = m->src_step[i];
        m->dst_step[i - 1] = m->dst_step[i];
        for (j = i; j + 1 < n; j++) {
            m->count[j] = m->count[j + 1];
            m->src_step[j] = m->src_step[j + 1];
            m->dst_step[j] = m->dst_step[j + 1];
        }
        n--;
    }
    if (n == 0) {
        m->count[0] = 1;
        m->src_step[0] = m->dst_step[0] = 1;
        n = 1;
    }
    for (i = n; i < GMM_CKPT_LOOPS; i++) m->count[i] = m->src_step[i] = m->dst_step[i] = 0;
    m->loops = n;
}

static void gmm__ck_add_loop(gmm_ckpt_move *m, int64_t count, int64_t src_step, int64_t dst_step) {
    m->count[m->loops] = count;
    m->src_step[m->loops] = src_step;
    m->dst_step[m->loops++] = dst_step;
}

static gmm_status gmm__ck_add_move(gmm__ck_builder *b, gmm_ckpt_move *m) {
    void *array = b->moves;
    gmm__ck_simplify_loops(m);
    if (!gmm__ck_reserve(&b->arena, &array, b->move_count, &b->move_capacity, sizeof *b->moves))
        return gmm__ck_no_memory(b);
    b->moves = (gmm_ckpt_move *)array;
    b->moves[b->move_count++] = *m;
    return GMM_OK;
}

/* The intersection of two shards in one expert. */
typedef struct gmm__ck_overlap {
    const gmm__ck_shard *src, *dst;
    gmm_ckpt_move_kind kind;
    int64_t expert, h0, h1, k0, k1;
} gmm__ck_overlap;

/* Adds the moves of rows f0 to f1 of the halves, `repeat` times at a distance of `period`, which is a multiple of
   both blocks. sb and db are the blocks of source and destination. The range is divided until it begins and ends at
   multiples of the coarser block and the finer block divides it; one move with strided loops then suffices. */
static gmm_status gmm__ck_move_rows(gmm__ck_builder *b, const gmm__ck_overlap *o, int64_t f0, int64_t f1,
                                    int64_t repeat, int64_t period) {
    const gmm__ck_shard *s = o->src, *d = o->dst;
    const int64_t sb = gmm__ck_row_block(s, f0, f1), db = gmm__ck_row_block(d, f0, f1);
    const int64_t coarse = sb > db ? sb : db, fine = sb && db ? (sb < db ? sb : db) : 0;
    gmm_ckpt_move m = GMM_ZERO;
    if (coarse) { /* blocks start at multiples of their size behind the first row of the shard */
        const int64_t first = coarse == sb ? s->f0 : d->f0;
        const int64_t up = gmm__min_i64(first + gmm__round_up(f0 - first, coarse), f1);
        const int64_t aligned = first + (f1 - first) / coarse * coarse;
        int64_t lcm = fine, f;
        gmm_status status = GMM_OK;
        if (f0 < up) status = gmm__ck_move_rows(b, o, f0, up, repeat, period);
        if (!status && f0 < up && up < f1) return gmm__ck_move_rows(b, o, up, f1, repeat, period);
        if (status || f0 < up) return status;
        if (aligned < f1) {
            status = gmm__ck_move_rows(b, o, f0, aligned, repeat, period);
            return status ? status : gmm__ck_move_rows(b, o, aligned, f1, repeat, period);
        }
        while (fine && lcm % coarse) lcm += fine;
        if (fine && lcm != coarse) { /* neither block divides the other */
            if (repeat == 1 && f1 - f0 > lcm && (f1 - f0) % lcm == 0)
                return gmm__ck_move_rows(b, o, f0, f0 + lcm, (f1 - f0) / lcm, lcm);
            for (f = f0; !status && f < f1; f += coarse)
                status = gmm__ck_move_rows(b, o, f, f + coarse, repeat, period);
            return status;
        }
    }
    m.kind = o->kind;
    m.scaling = o->kind == GMM_CKPT_DEQUANT ? s->scaling : GMM_SCALING_NONE;
    m.part = s->part;
    m.src = s->tensor;
    m.dst = d->tensor;
    m.scale = o->kind == GMM_CKPT_DEQUANT ? s->scale : -1;
    m.src_at = gmm__ck_element_offset(s, o->expert, o->h0, f0, o->k0);
    m.dst_at = gmm__ck_element_offset(d, o->expert, o->h0, f0, o->k0);
    gmm__ck_add_loop(&m, o->h1 - o->h0, s->block * s->row_step, d->block * d->row_step);
    gmm__ck_add_loop(&m, repeat, 2 * period * s->row_step, 2 * period * d->row_step);
    if (coarse) {
        gmm__ck_add_loop(&m, (f1 - f0) / coarse, gmm__ck_row_distance(s, coarse, !sb) * s->row_step,
                         gmm__ck_row_distance(d, coarse, !db) * d->row_step);
        if (fine)
            gmm__ck_add_loop(&m, coarse / fine, gmm__ck_row_distance(s, fine, sb == coarse && sb != fine) * s->row_step,
                             gmm__ck_row_distance(d, fine, db == coarse && db != fine) * d->row_step);
    }
    gmm__ck_add_loop(&m, fine ? fine : coarse ? coarse : f1 - f0, gmm__ck_row_distance(s, 1, 1) * s->row_step,
                     gmm__ck_row_distance(d, 1, 1) * d->row_step);
    gmm__ck_add_loop(&m, o->k1 - o->k0, s->col_step, d->col_step);
    return gmm__ck_add_move(b, &m);
}

