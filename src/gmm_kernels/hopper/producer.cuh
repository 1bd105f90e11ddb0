/* What a lane moves of each stage of a tile: one box. */
typedef struct gmm_sm90_box {
    const CUtensorMap *map;
    int32_t x, y, end, wrap; /* of stage 0 */
    uint32_t to;             /* place in a stage */
    int live, both, of_b;
} gmm_sm90_box;

/* Boxes of B of a tile. */
GMM__DEVICE int32_t gmm_sm90_boxes_b(const gmm_sm90_tile *t) { return (t->cols + 63) / 64; }
/* Box `box` of a tile for block `rank`: those of B, then those of A. A stage begins with B, `bytes_b` for each box. */
GMM__DEVICE void gmm_sm90_aim(const gmm_sm90_args *args, int ragged_k, int ta, int tb, int cols, uint32_t bytes_b,
                              int32_t box, uint32_t rank, const gmm_sm90_tile *t, gmm_sm90_box *o) {
    const int32_t boxes_b = gmm_sm90_boxes_b(t), tall = t->units / 4;
    const int32_t boxes_a = ta ? (t->units + 3) / 4 : tall + t->units % 4;
    o->live = t->cols > 0 && box < boxes_b + boxes_a;
    o->of_b = box < boxes_b;
    o->end = t->end;
    o->wrap = GMM_SM90_RAGGED;
    if (o->of_b) {
        o->both = t->share == 1;
        o->map = &args->b;
        o->to = (uint32_t)box * bytes_b;
        o->x = tb ? t->n0 + 64 * box : 0;
        o->y = ragged_k ? GMM_SM90_RAGGED - t->k : tb ? 0 : t->n0 + 64 * box;
        if (!ragged_k) {
            const uint64_t from = (uint64_t)(uintptr_t)gmm_kmat_at(&args->p.b, t->g) - GMM_SM90_BASE;
            o->end = (int32_t)(from >> 4 & 0x3FFF);
            o->wrap = (int32_t)(from >> 18);
        }
    } else {
        int32_t first;
        box -= boxes_b;
        first = ta || box < tall ? 64 * box : 16 * box + 48 * tall;
        o->both = t->share == 2;
        o->map = ta || box < tall ? &args->a : &args->a16;
        o->to = bytes_b * (uint32_t)(cols / 64) + 128 * (uint32_t)first;
        o->x = ta ? t->m0 + first : 0;
        o->y = ta ? GMM_SM90_RAGGED - t->k : GMM_SM90_RAGGED - (t->end - t->row) + t->m0 + first;
    }
    if (o->both && (box & 1) != (int)rank) o->live = 0;
}

/* A box of D: up to 64 rows by 128 bytes. A room holds a part of D, two of them side by side. */
typedef struct gmm_sm90_piece {
    int32_t x, y, z, w; /* its first column and row, where the group's D is */
    int live, once;     /* it goes by TMA; and gives way in the L2 to operands, which are read again */
} gmm_sm90_piece;

/* A group of threads waits until it may write part number `turn` of D to its room; has written there. `bars`: of the
   first room. Parts take the rooms by turns, whichever group writes them. */
GMM__DEVICE void gmm_sm90_room_wait(uint32_t bars, uint32_t turn) {
    gmm_bar_wait(bars + turn % 4 * 16, turn / 4 & 1);
}
GMM__DEVICE void gmm_sm90_room_written(uint32_t bars, uint32_t turn) {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
    __syncwarp();
    if ((gmm_tid() & 31) == 0) gmm_bar_arrive_here(bars + turn % 4 * 16 + 8);
}
/* Parts of D of a tile, with elements of `size` bytes. */
GMM__DEVICE uint32_t gmm_sm90_parts(const gmm_sm90_tile *t, int32_t size) {
    return t->cols > 0 ? (uint32_t)((t->rows + 63) / 64 * ((t->cols * size + 255) / 256)) : 0;
}

/* Whether D of a tile goes by TMA: rows at multiples of 16 bytes, and 16-bit D only if nothing is added to. */
GMM__DEVICE int gmm_sm90_passes(const gmm_gemm_args *p, int32_t g, float beta) {
    const int size = gmm_kmat_size(&p->d);
    return (((uint64_t)(uintptr_t)gmm_kmat_at(&p->d, g) | (uint64_t)(p->d.ld * size)) & 15) == 0 &&
           (size == 4 || beta == 0.0f);
}

/* Takes a lane's box of part number `nth` of D away when it is written. */
GMM__DEVICE void gmm_sm90_take(const gmm_sm90_args *args, const gmm_sm90_piece *p, uint32_t bars, uint32_t room,
                               uint32_t nth) {
    gmm_bar_wait(bars + nth % 4 * 16 + 8, nth / 4 & 1);
    room += nth % 4 * 16384;
    if (p->live && p->once) gmm_tma_store_once(&args->a16, room, p->x, p->y, p->z, p->w);
    else if (p->live) gmm_tma_store(&args->a16, room, 0, p->x, p->y, p->z, p->w);
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

/* Brings what is added to, and takes D away, between D and four rooms, for every other part from number `nth` on: two
   lanes of a warp, each a box. They go through the tiles part by part: 64 columns (16 bits: 128) from the first row to
   the last, then the next. Of each part the group of 128 threads whose tile it is hears (bars[0] of its room) that the
   room is free and holds what is added to, and tells (bars[1]) that it has written there; of a tile that it takes out
   itself as well. `bars`, `room`: of the first room. */
GMM__DEVICE void gmm_sm90_move(const gmm_sm90_args *args, const gmm_sm90_tile *ring, uint32_t told, uint32_t nth,
                               uint32_t bars, uint32_t room) {
    const int32_t lane = (int32_t)threadIdx.x & 31, size = gmm_kmat_size(&args->p.d), wide = 128 / size;
    gmm_sm90_piece older, newer; /* in the warp's two rooms; in registers, whose moves cost less than memory */
    int32_t x = 0, y = 0, m0 = 0, high = 1, after = 0, passes = 0, once = 0, last = 0; /* of the tile */
    float beta = 0.0f;
    uint64_t from = 0;
    uint32_t tile = 0, end = 0; /* tiles that were begun, their parts */
    older.x = older.y = older.z = older.w = older.live = older.once = 0;
    newer = older;
    room += 8192 * (uint32_t)lane;
    for (;; nth += 2, y += 128) {
        const uint32_t bar = bars + nth % 4 * 16;
        if (nth >= 4) gmm_sm90_take(args, &older, bars, room, nth - 4);
        for (; nth >= end && !last; tile++) { /* meanwhile it is seen what its room is for next */
            const gmm_sm90_tile *const t = &ring[tile % GMM_SM90_RING];
            __syncwarp(3); /* both have read the tile before */
            if (lane == 0) gmm_sm90_tile_read(told, tile);
            gmm_bar_wait(told + 8 * (tile % GMM_SM90_RING), tile / GMM_SM90_RING & 1);
            last = t->units == 0;
            x = t->n0 + lane * wide;
            y = 64 * (int32_t)(nth - end);
            m0 = t->m0;
            high = (t->rows + 63) / 64 * 64;
            after = t->n0 + t->cols;
            once = size == 2 || t->k >= 512; /* fp32 of shallow sums is read and written slower so */
            if (!last) {
                end += gmm_sm90_parts(t, size);
                beta = gmm_gemm_beta(&args->p, t->g);
                passes = gmm_sm90_passes(&args->p, t->g, beta);
                from = (uint64_t)(uintptr_t)gmm_kmat_at(&args->p.d, t->g) - GMM_SM90_BASE;
            }
        }
        if (last) break;
        for (; y >= high; y -= high) x += 2 * wide;
        older = newer;
        newer.x = x;
        newer.y = m0 + y;
        newer.z = (int32_t)(from >> 4 & 0x3FFF);
        newer.w = (int32_t)(from >> 18);
        newer.live = passes && x < after;
        newer.once = once;
        asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
        if (newer.live && beta != 0.0f) {
            const uint32_t to = room + nth % 4 * 16384;
            gmm_bar_expect(bar, 8192);
            if (once) gmm_tma_load_once(to, &args->a16, bar, newer.x, newer.y, newer.z, newer.w);
            else gmm_tma_load(to, &args->a16, bar, 0, newer.x, newer.y, newer.z, newer.w);
        } else gmm_bar_arrive_here(bar);
    }
    if (nth >= 2) gmm_sm90_take(args, &newer, bars, room, nth - 2);
    asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}

