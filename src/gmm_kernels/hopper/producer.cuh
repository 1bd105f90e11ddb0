/* TMA of the 16-bit products: the boxes of operands that the producer loads, and the boxes of D that the store warps of
   wgrad load and store. */

/* Where a matrix lies in a map that serves any address (gmm_sm90_map_matrix): bytes from the map's base, and from these
   the last two coordinates. */
GMM__DEVICE uint64_t gmm_sm90_map_offset(const void *data) { return (uint64_t)(uintptr_t)data - GMM_SM90_MAP_BASE; }
GMM__DEVICE int32_t gmm_sm90_map_z(uint64_t offset) { return (int32_t)(offset / 16 % GMM_SM90_MAP_STEPS); }
GMM__DEVICE int32_t gmm_sm90_map_w(uint64_t offset) { return (int32_t)(offset / (16 * GMM_SM90_MAP_STEPS)); }

/* The number of boxes of 64 columns of B that a tile reads. */
GMM__DEVICE int32_t gmm_sm90_b_boxes(const gmm_sm90_tile *t) { return (t->cols + 63) / 64; }

/* An operand of a tile as the producer loads it, in TMA boxes of 64 rows (A) or columns (B). What A has beyond a
   multiple of 64 rows comes in TMA boxes of 16 rows in forward and dgrad, where its rows are K-major. Those of a
   multicast operand alternate between the CTAs of a cluster. */
typedef struct gmm_sm90_operand {
    int mn_major;           /* its rows or columns are the first coordinate of its map, else the second */
    uint32_t box_bytes;     /* of 64 rows or columns */
    int32_t glu_block;      /* B of a glu product: gmm_sm90_glu.block; else 0 */
    int32_t step;           /* from one of 64 to the next: 64, or in a glu product from gate to linear columns */
    uint32_t mask, mask16;  /* a bit for each that this CTA loads, of 64 and of 16 rows */
    int32_t multicast;      /* both CTAs of the cluster get what one of them loads */
    int32_t first, first16; /* coordinate of the first row or column; rows before those of 16 rows */
    int32_t end, wrap;      /* the last two coordinates; of weights, the address */
} gmm_sm90_operand;

/* A and B of a tile. of_cta: what this CTA loads of a multicast operand. k_grouped: a constant, wgrad. */
GMM__DEVICE void gmm_sm90_assign_a(const gmm_sm90_tile *t, const int k_grouped, uint32_t of_cta, gmm_sm90_operand *a) {
    const int32_t num_boxes = k_grouped ? (t->row_blocks + 3) / 4 : t->row_blocks / 4;
    uint32_t mask = (1u << (num_boxes + (k_grouped ? 0 : t->row_blocks % 4))) - 1;
    a->multicast = t->multicast == GMM_SM90_MULTICAST_A;
    if (a->multicast) mask &= of_cta;
    if (t->cols <= 0) mask = 0;
    a->mask = mask & ((1u << num_boxes) - 1);
    a->mask16 = mask >> num_boxes;
    a->first = k_grouped ? t->m0 : GMM_SM90_RAGGED_ROWS - (t->end - t->row) + t->m0;
    a->first16 = 64 * num_boxes;
    a->end = t->end;
    a->wrap = GMM_SM90_RAGGED_ROWS;
}
GMM__DEVICE void gmm_sm90_assign_b(const gmm_gemm_args *p, const gmm_sm90_tile *t, const int k_grouped, uint32_t of_cta,
                                   gmm_sm90_operand *b) {
    b->multicast = t->multicast == GMM_SM90_MULTICAST_B;
    b->mask = t->cols > 0 ? (1u << gmm_sm90_b_boxes(t)) - 1 : 0;
    if (b->multicast) b->mask &= of_cta;
    b->first = b->glu_block ? gmm_sm90_glu_column(b->glu_block, t->n0) : t->n0;
    b->end = t->end;
    b->wrap = GMM_SM90_RAGGED_ROWS;
    if (!k_grouped && t->cols > 0) {
        const uint64_t offset = gmm_sm90_map_offset(gmm_kmat_data(&p->b, t->g));
        b->end = gmm_sm90_map_z(offset);
        b->wrap = gmm_sm90_map_w(offset);
    }
}

/* A stage as the producer fills it: where the operand lies in shared memory, its full barrier, and the coordinate along
   the contraction. */
typedef struct gmm_sm90_load {
    uint32_t at, full;
    int32_t k;
} gmm_sm90_load;
/* Loads TMA box b of an operand, of `rows` rows or columns; rows: a constant, 64 or 16. */
GMM__DEVICE void gmm_sm90_load_box(const gmm_sm90_operand *o, const CUtensorMap *map, const int rows, int b,
                                   const gmm_sm90_load *stage) {
    const int32_t before = rows * b + (rows == 16 ? o->first16 : 0);
    const int32_t at = o->first + (rows == 16 ? before : o->step * b);
    gmm_tma_load(stage->at + o->box_bytes / 64 * (uint32_t)before, map, stage->full, o->multicast,
                 o->mn_major ? at : stage->k, o->mn_major ? stage->k : at, o->end, o->wrap);
}
/* Loads what an operand has in a stage. most: a constant, the most TMA boxes that there may be. The loop is unrolled,
   since the producer has no time to spare (KERNELS.md, "Producer"). */
GMM__DEVICE void gmm_sm90_load_operand(const gmm_sm90_operand *o, const CUtensorMap *map, const int rows,
                                       const int most, const gmm_sm90_load *stage) {
    const uint32_t mask = rows == 16 ? o->mask16 : o->mask;
    int b;
#pragma unroll
    for (b = 0; b < most; b++)
        if (mask >> b & 1) gmm_sm90_load_box(o, map, rows, b, stage);
}
/* The same for two stages at once, in small-M mode: the boxes of the same lines are requested one after the other. The
   loads of weights bound the product there, so that the loop is not unrolled. */
GMM__DEVICE void gmm_sm90_load_operand_twice(const gmm_sm90_operand *o, const CUtensorMap *map, const int rows,
                                             const gmm_sm90_load stages[2]) {
    const uint32_t mask = rows == 16 ? o->mask16 : o->mask;
    int b;
#pragma unroll 1
    for (b = 0; mask >> b; b++)
        if (mask >> b & 1) {
            gmm_sm90_load_box(o, map, rows, b, &stages[0]);
            gmm_sm90_load_box(o, map, rows, b, &stages[1]);
        }
}

/* A TMA box of D: up to 64 rows by 128 bytes. A store slot holds a part of D, two boxes side by side. */
typedef struct gmm_sm90_d_box {
    int evict_first;    /* D is evicted from the L2 before operands, which are read again */
    int active;         /* TMA stores it */
    int32_t w, z, y, x; /* TMA coordinates: address of the group's D, first row, first column */
} gmm_sm90_d_box;

/* A consumer warp group waits until the slot of part number `part` of D is empty, and commits it when it has written
   the part. Part n lies in slot n % GMM_SM90_STORE_SLOTS, whichever warp group writes it. */
GMM__DEVICE void gmm_sm90_acquire_slot(uint32_t bars, uint32_t part) {
    gmm_mbarrier_wait(gmm_sm90_store_empty(bars, part), part / GMM_SM90_STORE_SLOTS & 1);
}
GMM__DEVICE void gmm_sm90_commit_slot(uint32_t bars, uint32_t part) {
    gmm_fence_proxy_async();
    __syncwarp();
    if ((gmm_tid_x() & 31) == 0) gmm_mbarrier_arrive(gmm_sm90_store_full(bars, part));
}
/* Parts of 64 rows x 256 bytes of a tile of D, with elements of `size` bytes. */
GMM__DEVICE uint32_t gmm_sm90_d_parts(const gmm_sm90_tile *t, int32_t size) {
    return t->cols > 0 ? (uint32_t)((t->rows + 63) / 64 * ((t->cols * size + 255) / 256)) : 0;
}

/* Whether TMA may store D at `data`: rows begin and end at multiples of 16 bytes, since a TMA store writes whole units
   of 16 bytes even past the columns of its map. */
GMM__HD int gmm_sm90_tma_stores(const void *data, int64_t ld, int64_t n, int32_t size) {
    return (((uintptr_t)data | (uintptr_t)(ld * size) | (uintptr_t)(n * size)) & 15) == 0;
}
/* Whether TMA stores a group's D in wgrad; 16-bit D only where beta is 0. */
GMM__DEVICE int gmm_sm90_d_by_tma(const gmm_gemm_args *p, int32_t g, float beta) {
    const int size = gmm_kmat_size(&p->d);
    return gmm_sm90_tma_stores(gmm_kmat_data(&p->d, g), p->d.ld, p->n, size) && (size == 4 || beta == 0.0f);
}

/* Stores a lane's box of part number `part` as soon as consumers have written the slot. */
GMM__DEVICE void gmm_sm90_store_part(const gmm_sm90_args *args, const gmm_sm90_d_box *box, uint32_t bars,
                                     uint32_t slot, uint32_t part) {
    gmm_mbarrier_wait(gmm_sm90_store_full(bars, part), part / GMM_SM90_STORE_SLOTS & 1);
    slot += part % GMM_SM90_STORE_SLOTS * GMM_SM90_PART_BYTES;
    if (box->active && box->evict_first) gmm_tma_store_evict_first(&args->d, slot, box->x, box->y, box->z, box->w);
    else if (box->active) gmm_tma_store(&args->d, slot, 0, box->x, box->y, box->z, box->w);
    gmm_bulk_commit_group();
}

/* The store warps of wgrad: each serves every other part of D, with two lanes that have a box each. In the order of
   tiles, and within a tile column block by column block from the first row to the last, it loads old D into the slot
   where beta is not 0, passes the slot to the consumers (store_empty), waits for their result (store_full) and stores
   it. Tiles that the consumers store themselves pass through the same barriers. slots: address of the first slot; part:
   the first part of this warp. */
GMM__DEVICE void gmm_sm90_store_tiles(const gmm_sm90_args *args, const gmm_sm90_tile *ring, uint32_t bars,
                                      uint32_t part, uint32_t slots) {
    const int32_t lane = (int32_t)threadIdx.x & 31, size = gmm_kmat_size(&args->p.d), cols = 128 / size;
    /* boxes in the warp's two slots; two variables and a copy, since an array would lie in local memory */
    gmm_sm90_d_box current, previous;
    /* of the current tile; x and y are those of the box that is stored next */
    int32_t x = 0, y = 0, m0 = 0, rows = 1, col_end = 0, by_tma = 0, evict_first = 0, done = 0;
    float beta = 0.0f;
    uint64_t offset = 0;
    uint32_t tile_index = 0, part_end = 0; /* tiles read so far, and the end of their parts */
    previous.x = previous.y = previous.z = previous.w = previous.active = previous.evict_first = 0;
    current = previous;
    slots += GMM_SM90_BOX_BYTES * (uint32_t)lane;
    /* parts go down by 64 rows, and this warp has every other one; the previous part of its slot is 4 parts ago */
    for (;; part += 2, y += 128) {
        const uint32_t slot_bar = gmm_sm90_store_empty(bars, part);
        if (part >= GMM_SM90_STORE_SLOTS)
            gmm_sm90_store_part(args, &previous, bars, slots, part - GMM_SM90_STORE_SLOTS);
        for (; part >= part_end && !done; tile_index++) { /* the store above is under way while the next tile is read */
            const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
            __syncwarp(3); /* both lanes have read the previous tile */
            if (lane == 0) gmm_sm90_release_batch(bars, tile_index);
            gmm_sm90_wait_tile(bars, tile_index);
            done = t->row_blocks == 0;
            x = t->n0 + lane * cols;
            y = 64 * (int32_t)(part - part_end);
            m0 = t->m0;
            rows = (t->rows + 63) / 64 * 64;
            col_end = t->n0 + t->cols;
            evict_first = size == 2 || t->k >= 512; /* short sums are slower with evict_first */
            if (!done) {
                part_end += gmm_sm90_d_parts(t, size);
                beta = gmm_gemm_beta(&args->p, t->g);
                by_tma = gmm_sm90_d_by_tma(&args->p, t->g, beta);
                offset = gmm_sm90_map_offset(gmm_kmat_data(&args->p.d, t->g));
            }
        }
        if (done) break;
        for (; y >= rows; y -= rows) x += 2 * cols;
        previous = current;
        current.x = x;
        current.y = m0 + y;
        current.z = gmm_sm90_map_z(offset);
        current.w = gmm_sm90_map_w(offset);
        current.active = by_tma && x < col_end;
        current.evict_first = evict_first;
        GMM__BULK_WAIT_GROUP_READ(0);
        if (current.active && beta != 0.0f) {
            const uint32_t to = slots + part % GMM_SM90_STORE_SLOTS * GMM_SM90_PART_BYTES;
            gmm_mbarrier_arrive_expect_tx(slot_bar, GMM_SM90_BOX_BYTES);
            if (evict_first)
                gmm_tma_load_evict_first(to, &args->d, slot_bar, current.x, current.y, current.z, current.w);
            else gmm_tma_load(to, &args->d, slot_bar, 0, current.x, current.y, current.z, current.w);
        } else gmm_mbarrier_arrive(slot_bar);
    }
    if (part >= 2) gmm_sm90_store_part(args, &current, bars, slots, part - 2);
    GMM__BULK_WAIT_GROUP(0);
}

