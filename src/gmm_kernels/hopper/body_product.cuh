#elif GMM__BODY == 9
#define GMM__OF(name) (int)GMM__CAT(gmm9_##name##_, GMM__TILE)
#define GMM__OPS(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__OP), _), GMM__TAG), _)
#define GMM__PART(part) GMM__CAT(GMM__OPS(part), GMM__TILE)
/* A kernel of two tiles takes the other's functions, which were made first, without a kernel (GMM__FIRST). */
#ifdef GMM__OTHER
#define GMM__OTHERS(part) GMM__CAT(GMM__OPS(part), GMM__OTHER)
#define GMM__WHICH args.tile
#define GMM__SECOND(name) (int)GMM__CAT(gmm9_##name##_, GMM__OTHER)
#define GMM__ANY(second, name) ((second) ? GMM__SECOND(name) : GMM__OF(name))
#define GMM__NAME GMM__CAT(GMM__CAT(GMM__CAT(GMM__OTHERS(gmm_linear_), _), GMM__TILE), _sm90)
#else
#define GMM__WHICH 0
#define GMM__SECOND(name) 0
#define GMM__ANY(second, name) ((void)(second), GMM__OF(name))
#define GMM__NAME GMM__CAT(GMM__PART(gmm_linear_), _sm90)
#endif
#define GMM__TA GMM__CAT(gmm_ta_, GMM__OP)
#define GMM__TB GMM__CAT(gmm_tb_, GMM__OP)
#define GMM__RAGGED GMM__CAT(gmm_ragged_k_, GMM__OP)
/* Rows of sums that go out at once. */
#define GMM__LOT (GMM__OF(out) >= 4 && GMM__OF(mb) * GMM__OF(units) < 24 ? 32 : 16)

/* Words of D that wait in registers, those that go out at once, and a group's rooms for these. An instance with an
   epilogue has no registers left for them. */
#ifdef GMM__EPILOGUE
#define GMM__LATER 0
#else
#define GMM__LATER GMM__OF(later)
#endif
#define GMM__WAITS (GMM__LATER ? 4 * GMM__OF(units) : 1)
#define GMM__GOES (GMM__LATER ? 4 * GMM__OF(later) : 1)
#define GMM__ROOMS (GMM__LATER ? 2 * GMM__OF(out) / GMM__OF(later) : 2)
/* Whether the first products set the sums, which would be 0 otherwise. */
#define GMM__SETS (GMM__LATER || GMM__RAGGED)
/* Tiles begin at multiples of so many rows. Products there are for as many eights as a tile can have. */
#define GMM__STEP (GMM__RAGGED ? 64 : 8)
#define GMM__MADE(e) ((e) <= 2 * GMM__OF(units) && (!GMM__RAGGED || (e) % 8 == 0))
/* The most rows of a group with which all that a kernel waits for is weights along the contraction. Memory gives 256
   bytes of a line faster together: two stages are asked for at once, and handed back as soon as they are multiplied.
   From half as many rows on products take time as well, and where groups differ it is lost. */
#define GMM__LOW(cols) \
    (!GMM__RAGGED && !GMM__TB && !GMM__OF(of) && GMM__OF(teams) == 2 && (cols) == 256 ? GMM_SM90_LOW : 0)
/* The rooms of D of a group of threads, or that of a part, which has the same room whichever group writes it. */
#define GMM__ROOM(wg, nth) \
    (shared + GMM__OF(rooms) + GMM__OF(room) * (GMM__RAGGED ? (int)((nth) % 4) : 2 * (wg)))
#define GMM__PLACER (GMM__OF(of) ? 11 : 9) /* the warp that places tiles */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Of tile `t`, whose 16-bit D waits in registers, the next rows go out through one of the group's rooms, by TMA where
   rows are at multiples of 16 bytes: 3 stages until a room is needed again, so that nobody waits. `kept`: units that
   wait. The registers are picked by predicates, since moving the others up would take as many again. */
GMM__DEVICE void GMM__PART(gmm9_send_)(const GMM__ARGS *args, const gmm_sm90_tile *t, int wg, char *mine,
                                       const uint32_t waits[GMM__WAITS], int *kept, uint32_t *turn) {
    const int tid = gmm_tid() & 127, lane = tid & 31, w = tid >> 5, row = 16 * (t->units - *kept);
    char *const room = mine + *turn % GMM__ROOMS * (512 * GMM__GOES);
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(room);
    const uint32_t put = at + (lane / 16 * 8 + lane % 8) * 128 + (((2 * w + lane / 8 % 2) ^ (lane % 8)) << 4);
    const gmm_kmat *const d = &args->p.d;
    int x, e;
#pragma unroll
    for (x = 0; x + 3 < GMM__WAITS; x += 4)
        gmm_stmatrix_t_if(x / GMM__GOES * GMM__OF(later) == row / 16, put + x % GMM__GOES * 512, waits[x],
                          waits[x + 1], waits[x + 2], waits[x + 3]);
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
    if (tid == 0) /* the next room is free */
        asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(GMM__ROOMS - 2) : "memory");
    gmm_bar_half(wg);
    if ((((uint64_t)(uintptr_t)d->data | (uint64_t)(d->ld * 2)) & 15) == 0) {
        if (tid == 0) {
            gmm_tma_store(&args->d, at, 0, t->n0 + 64 * wg, GMM_SM90_RAGGED - t->rows + row, t->row + t->m0 + t->rows,
                          GMM_SM90_RAGGED);
            asm volatile("cp.async.bulk.commit_group;" : : : "memory");
        }
    } else {
        const int c = 64 * wg + 8 * (tid % 8);
        char *to = (char *)d->data + (((int64_t)t->row + t->m0 + row + tid / 8) * d->ld + t->n0 + c) * 2;
#pragma unroll 1
        for (x = tid / 8; x < 4 * GMM__GOES && row + x < t->rows; x += 16, to += 32 * d->ld)
#pragma unroll 1
            for (e = 0; e < 8 && c + e < t->cols; e++)
                ((uint16_t *)to)[e] = ((const uint16_t *)(room + x * 128 + (((tid % 8) ^ (x & 7)) << 4)))[e];
    }
    *kept -= GMM__OF(later);
    (*turn)++;
}

/* The sums of a tile of `eights` times 8 rows for a group of 128 threads: `depths` stages from number *at on. `columns`
   is the descriptor of the group's columns in stage 0; `come`: tells the other group, if they take turns, that the last
   stage has come. What waits of the tile before goes out by the way. `low`: a stage is handed back when it is
   multiplied, else when the next one is there too, so that products never pause. */
GMM__DEVICE void GMM__PART(gmm9_sum_)(const int eights, const int low, float sum[GMM__OF(mb)][8 * GMM__OF(units)],
                                      uint32_t depths, uint64_t columns, uint64_t rows, uint32_t bars, uint32_t come,
                                      uint32_t pair, uint32_t *at, const GMM__ARGS *args, const gmm_sm90_tile *before,
                                      int wg, char *mine, const uint32_t waits[GMM__WAITS], int *kept, uint32_t *turn) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t q, s = *at % GMM__OF(stages), parity = *at / GMM__OF(stages) & 1, last = 0;
    int kk, j;
#pragma unroll 1
    for (q = 0;; q++) {
        const uint64_t b = columns + s * (GMM__OF(stage) >> 4), a = rows + s * (GMM__OF(stage) >> 4);
        gmm_bar_wait(bars + 16 * s, parity);
        if (GMM__OF(teams) == 1 && q == depths - 1 && lane == 0) gmm_bar_arrive_here(come);
        gmm_wgmma_fence();
#pragma unroll
        for (kk = 0; kk < 4; kk++)
#pragma unroll
            for (j = 0; j < GMM__OF(mb); j++)
                GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), GMM__OP)(
                    eights, sum[j], b + j * (8192 >> 4) + kk * ((GMM__TB ? 2048 : 32) >> 4),
                    a + kk * ((GMM__TA ? 2048 : 32) >> 4), !GMM__SETS || q > 0 || kk > 0);
        gmm_wgmma_commit();
        if (low) GMM__WGMMA_WAIT(0);
        else GMM__WGMMA_WAIT(1);
        if ((low || q > 0) && lane < pair) gmm_bar_arrive(bars + 16 * (low ? s : last) + 8, lane);
        if (GMM__LATER && *kept > 0) GMM__PART(gmm9_send_)(args, before, wg, mine, waits, kept, turn);
        last = s;
        if (q + 1 == depths) break;
        if (++s == GMM__OF(stages)) {
            s = 0;
            parity ^= 1;
        }
    }
    GMM__WGMMA_WAIT(0);
    if (!low && lane < pair) gmm_bar_arrive(bars + 16 * last + 8, lane);
    *at += depths;
}

/* What the groups of threads do: they multiply, and take D to memory. */
GMM__DEVICE void GMM__PART(gmm9_multiply_)(const GMM__ARGS &args, char *shared, const gmm_sm90_tile *ring,
                                           const uint32_t base, const uint32_t bars, const uint32_t told) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    uint32_t pair;
    const int w = warp & 3;
    const int tid = (int)threadIdx.x & 127;
    const int size = gmm_kmat_size(&args.p.d);
    const int64_t pitch = args.p.d.ld * size;
    float sum[GMM__OF(mb)][8 * GMM__OF(units)];
    const uint32_t come = told + 8 * (GMM_SM90_RING + GMM_SM90_BATCHES); /* the last stages of groups' tiles */
    const volatile int32_t *const low = (const volatile int32_t *)(ring + GMM_SM90_RING + 1) + 1;
    uint32_t at = 0, turn = 0, tile = 0, waits[GMM__WAITS];
    int j, u, e, x, kept = 0;
#pragma unroll
    for (u = 0; u < GMM__WAITS; u++) waits[u] = 0;
    for (;; tile++) {
        const gmm_sm90_tile *const t = &ring[tile % GMM_SM90_RING];
        const int wg = __shfl_sync(0xFFFFFFFFu, gmm_tid() >> 7, 0); /* not kept while sums go out */
        char *const mine = GMM__ROOM(wg, turn); /* rooms for D on its way */
        const int first = GMM__OF(teams) == 1 ? 0 : 64 * GMM__OF(mb) * wg; /* of the tile's columns */
        const uint32_t codes = base + GMM__OF(box) * (uint32_t)(first + 16 * w); /* of the warp; of its scales */
        const uint32_t scales = base + GMM__OF(scales) + 4 * (uint32_t)(first + 16 * w);
        const gmm_sm90_tile *const before = &ring[(tile - 1) % GMM_SM90_RING];
        uint32_t depths, here = base;
        uint64_t columns, lines;
        __syncwarp();
        if (lane == 0) gmm_sm90_tile_read(told, tile - (GMM__LATER != 0)); /* D that waits is not there yet */
        gmm_bar_wait(told + 8 * (tile % GMM_SM90_RING), tile / GMM_SM90_RING & 1);
        while (GMM__LATER && kept > 0 && t->cols <= first) /* no products to go out beside */
            GMM__PART(gmm9_send_)(&args, before, wg, mine, waits, &kept, &turn);
        if (t->units == 0) {
            if (GMM__RAGGED && tile > 0 && (int)(tile & 1) == wg) gmm_bar_turn(wg, 1);
            break;
        }
        depths = gmm_sm90_depths(t->k);
        pair = gmm_cluster_size(); /* not kept while sums go out */
        if (GMM__OF(teams) == 1 && (int)(tile & 1) != wg) { /* the other's turn */
            at += depths;
            if (GMM__RAGGED) turn += gmm_sm90_parts(t, size);
            continue;
        }
        /* who takes turns has not followed the other, and a parity tells a phase only from the one before */
        if (GMM__OF(teams) == 1 && tile > 0) gmm_bar_wait(come + 8 * (wg ^ 1), (tile - 1) / 2 & 1);
        if (t->cols <= first) { /* nothing to multiply: hands the stages back */
            for (; depths > 0; depths--, at++) {
                const uint32_t s = at % GMM__OF(stages);
                gmm_bar_wait(bars + 16 * s, at / GMM__OF(stages) & 1);
                if (lane < (int)pair) gmm_bar_arrive(bars + 16 * s + 8, (uint32_t)lane);
            }
            if (GMM__OF(teams) == 1 && lane == 0) gmm_bar_arrive_here(come + 8 * wg);
            if (GMM__RAGGED) { /* nothing to take away either */
                if (tile > 0) gmm_bar_turn(wg, 1);
                gmm_bar_turn(wg ^ 1, 0);
            }
            continue;
        }
        if (!GMM__OF(of)) asm volatile("" : "+r"(here)); /* descriptors are not kept while sums go out */
        columns = gmm_wgmma_desc(here + 128 * first, GMM__TB);
        lines = gmm_wgmma_desc(here + GMM__OF(b), GMM__TA);
#pragma unroll
        for (j = 0; j < (GMM__SETS ? 0 : GMM__OF(mb)); j++)
#pragma unroll
            for (u = 0; u < 8 * GMM__OF(units); u++) sum[j][u] = 0.0f;
        switch (GMM__RAGGED ? (t->rows + 63) / 64 * 8 : gmm_sm90_eights(t->rows)) {
#define GMM__PLAIN(e, low) GMM__PART(gmm9_sum_)(e, low, sum, depths, columns, lines, bars, come + 8 * wg, pair, &at, \
                                            &args, before, wg, mine, waits, &kept, &turn)
#define GMM__CODES(u) gmm_sm90_sum_codes(GMM__OF(of), u, GMM__OF(stages), GMM__OF(stage), sum[0], depths, codes, \
                                     scales, lines, bars, pair, &at)
#define GMM__X(e, u, n, b, a, c) \
case e: if (e <= 2 * GMM__OF(units) && GMM__OF(of)) GMM__CODES(e <= 2 * GMM__OF(units) ? (e + 1) / 2 : 1); \
        else if (GMM__MADE(e) && 8 * e <= GMM__LOW(GMM__OF(cols)) && *low) GMM__PLAIN(GMM__MADE(e) ? e : 2, 1); \
        else if (GMM__MADE(e)) GMM__PLAIN(GMM__MADE(e) ? e : 2, 0); \
        break;
        GMM_WGMMA_LIST(GMM__X)
#undef GMM__X
#undef GMM__CODES
#undef GMM__PLAIN
        default: break;
        }
#pragma unroll
        for (j = 0; j < GMM__OF(mb); j++)
#pragma unroll
            for (u = 0; u < 8 * GMM__OF(units); u++) asm volatile("" : "+f"(sum[j][u]) : : "memory");
        while (GMM__LATER && kept > 0) GMM__PART(gmm9_send_)(&args, before, wg, mine, waits, &kept, &turn);
#pragma unroll
        for (u = 0; u < GMM__WAITS; u++) waits[u] = 0; /* no longer kept */
        { /* from registers to D, transposed in shared memory */
            const char *const bias = GMM__RAGGED || args.p.bias.dtype == GMM_NONE ? NULL
                                                                                  : gmm_kmat_at(&args.p.bias, t->g);
            const int units = t->units, rows = t->rows;
            const uint32_t held = come + 16; /* the barriers of rooms */
#pragma unroll 1
            for (x = 0; x < 2; x++) {
                const float *const by = x ? args.alpha2 : args.p.alpha;
                const float alpha = by && t->k > 0 ? by[args.p.alpha_per_group ? t->g : 0] : 1.0f;
                if (alpha != 1.0f) {
#pragma unroll
                    for (j = 0; j < GMM__OF(mb); j++)
#pragma unroll
                        for (u = 0; u < 8 * GMM__OF(units); u++) sum[j][u] = __fmul_rn(sum[j][u], alpha);
                }
            }
            if (bias) {
                const float *const row_scale = args.p.row_scale ? args.p.row_scale + t->row + t->m0 : NULL;
                float low[GMM__OF(mb)][4], high[GMM__OF(mb)][4], by[GMM__OF(units) / 2 + 1]; /* a lane per row */
#pragma unroll
                for (x = 0; x < (GMM__OF(units) + 1) / 2; x++)
                    by[x] = row_scale && 32 * x + lane < rows ? row_scale[32 * x + lane] : 1.0f;
#pragma unroll
                for (j = 0; j < GMM__OF(mb); j++) {
                    const int c = t->n0 + first + 64 * j + 16 * w + lane / 4, bytes = gmm_kmat_size(&args.p.bias);
                    gmm_read4(args.p.bias.dtype, bias + (int64_t)c * bytes, c < args.p.n, 0, low[j]);
                    gmm_read4(args.p.bias.dtype, bias + (int64_t)(c + 8) * bytes, c + 8 < args.p.n, 0, high[j]);
                }
#pragma unroll
                for (u = 0; u < 8 * GMM__OF(units); u += 4) {
                    const float s0 = __shfl_sync(0xFFFFFFFFu, by[u / 16], u % 16 * 2 + lane % 4 * 2);
                    const float s1 = __shfl_sync(0xFFFFFFFFu, by[u / 16], u % 16 * 2 + lane % 4 * 2 + 1);
#pragma unroll
                    for (j = 0; j < GMM__OF(mb); j++) {
                        sum[j][u] = __fmaf_rn(low[j][0], s0, sum[j][u]);
                        sum[j][u + 1] = __fmaf_rn(low[j][0], s1, sum[j][u + 1]);
                        sum[j][u + 2] = __fmaf_rn(high[j][0], s0, sum[j][u + 2]);
                        sum[j][u + 3] = __fmaf_rn(high[j][0], s1, sum[j][u + 3]);
                    }
                }
            }
            const float beta = gmm_gemm_beta(&args.p, t->g);
            const int passes = GMM__RAGGED && gmm_sm90_passes(&args.p, t->g, beta);
            char *const d = gmm_kmat_at(&args.p.d, t->g) + (t->m0 + (GMM__RAGGED ? 0 : (int64_t)t->row)) * pitch;
            const int whole = (((uint64_t)(uintptr_t)d | (uint64_t)pitch) & 15) == 0;
            if (GMM__RAGGED && tile > 0) gmm_bar_turn(wg, 1); /* rooms are taken in the order of tiles */
            if (passes && size == 2) { /* rooms hold boxes of 16-bit D */
                const int tid = gmm_tid() & 127, lane = tid & 31, w = tid >> 5;
                const uint32_t put = base + GMM__OF(rooms) +
                                     (lane / 16 * 8 + lane % 8) * 128 +
                                     (((2 * w + lane / 8 % 2) ^ (lane % 8)) << 4);
#pragma unroll
                for (u = 0; u < GMM__OF(units); u++) {
                    if (u % 4 == 0) { /* rows that D has not got stay in the room */
                        if (u >= units) break;
                        gmm_sm90_room_wait(held, turn);
                    }
#pragma unroll
                    for (j = 0; j < GMM__OF(mb); j++) {
                        const float *const f = &sum[j][8 * u];
                        gmm_stmatrix_t(put + turn % 4 * GMM__OF(room) + j * 8192 + u % 4 * 2048,
                                       gmm_pack2(GMM__DTYPE, f[0], f[1]), gmm_pack2(GMM__DTYPE, f[2], f[3]),
                                       gmm_pack2(GMM__DTYPE, f[4], f[5]), gmm_pack2(GMM__DTYPE, f[6], f[7]));
                    }
                    if (u % 4 == 3) gmm_sm90_room_written(held, turn++);
                }
            } else if (GMM__LATER && size == 2 && beta == 0.0f) { /* waits for the next tile's products */
#pragma unroll
                for (u = 0; u < GMM__WAITS; u++)
                    waits[u] = gmm_pack2(GMM__DTYPE, sum[0][2 * u], sum[0][2 * u + 1]);
                kept = units;
            } else if (!GMM__RAGGED && !GMM__LATER && size == 2 && beta == 0.0f) { /* rooms hold [row][column] */
                const int tid = gmm_tid() & 127, lane = tid & 31, w = tid >> 5; /* not kept while sums are made */
                const int wide = 128 * GMM__OF(mb), chunk = tid % (8 * GMM__OF(mb)), line = tid / (8 * GMM__OF(mb));
                const int left = t->cols - first - 8 * chunk;
                const int plain = whole && (t->cols - first >= 64 * GMM__OF(mb) || (t->cols - first) % 8 == 0);
                const int below = left > 0 ? rows - line : 0;
                const uint32_t put = (uint32_t)__cvta_generic_to_shared(mine) + (lane / 16 * 8 + lane % 8) * wide +
                                     (((2 * w + lane / 8 % 2) ^ (lane % 8)) << 4);
                const char *const get = mine + line * wide + ((chunk ^ (line & 7)) << 4);
                char *to = d + line * pitch + (t->n0 + first + 8 * chunk) * 2;
#pragma unroll
                for (u = 0; u < GMM__OF(units); u += GMM__OF(out) / GMM__OF(mb)) {
                    const int room = (turn & 1) * GMM__OF(room);
                    uint4 v[GMM__OF(out)];
                    if (u >= units) break;
                    turn++;
#pragma unroll
                    for (x = 0; x < GMM__OF(out) / GMM__OF(mb); x++)
#pragma unroll
                        for (j = 0; j < GMM__OF(mb); j++)
                            if (u + x < GMM__OF(units)) {
                                const float *const f = &sum[j][8 * (u + x)];
                                gmm_stmatrix_t(put + room + x * 16 * wide + 128 * j,
                                               gmm_pack2(GMM__DTYPE, f[0], f[1]), gmm_pack2(GMM__DTYPE, f[2], f[3]),
                                               gmm_pack2(GMM__DTYPE, f[4], f[5]),
                                               gmm_pack2(GMM__DTYPE, f[6], f[7]));
                            }
                    gmm_bar_half(wg);
#ifdef GMM__EPILOGUE /* of an instance: takes the rows of D that stand in the room; whether D gets them, too */
                    if (!GMM__EPILOGUE(&args, t, mine + room, wide, 16 * u, GMM__OF(out) * 2048 / wide, first))
                        continue;
#endif
                    if (plain) {
#pragma unroll
                        for (x = 0; x < GMM__OF(out); x++) v[x] = *(const uint4 *)(get + room + x * 2048);
#pragma unroll
                        for (x = 0; x < GMM__OF(out); x++, to += 16 / GMM__OF(mb) * pitch)
                            if (16 * u + 16 / GMM__OF(mb) * x < below) *(uint4 *)to = v[x];
                    } else {
#pragma unroll 1
                        for (x = 0; x < GMM__OF(out); x++, to += 16 / GMM__OF(mb) * pitch)
#pragma unroll 1
                            for (e = 0; e < 8 && e < left && 16 * u + 16 / GMM__OF(mb) * x < below; e++)
                                ((uint16_t *)to)[e] = ((const uint16_t *)(get + room + x * 2048))[e];
                    }
                }
            } else if (passes) { /* rooms hold boxes of fp32 */
                const int tid = gmm_tid() & 127, lane = tid & 31, w = tid >> 5;
                /* of column lane / 4 and row 2 (lane % 4); 8 columns and a row more are other bits of it */
                const uint32_t to = base + GMM__OF(rooms) + w / 2 * 8192 +
                                    lane % 4 * 256 + lane / 4 % 4 * 4 +
                                    (((w % 2 * 4 + lane / 16) ^ (lane % 4 * 2)) << 4);
#pragma unroll
                for (j = 0; j < GMM__OF(mb); j++) {
                    if (first + 64 * j >= t->cols) break;
#pragma unroll
                    for (u = 0; u < 2 * GMM__OF(units); u++) {
                        const uint32_t part = turn % 4 * GMM__OF(room) + u % 8 * 1024;
                        float old[4];
                        if (u % 8 == 0) {
                            if (u >= 2 * units) break;
                            gmm_sm90_room_wait(held, turn);
                        }
                        if (beta != 0.0f) {
#pragma unroll
                            for (e = 0; e < 4; e++)
                                old[e] = gmm_shared_read((to ^ (e / 2 * 32 + e % 2 * 144)) + part);
#pragma unroll
                            for (e = 0; e < 4; e++) sum[j][4 * u + e] = __fmaf_rn(beta, old[e], sum[j][4 * u + e]);
                        }
#pragma unroll
                        for (e = 0; e < 4; e++)
                            gmm_shared_write((to ^ (e / 2 * 32 + e % 2 * 144)) + part, sum[j][4 * u + e]);
                        if (u % 8 == 7) gmm_sm90_room_written(held, turn++);
                    }
                }
            } else { /* rooms hold sums */
                uint32_t lot = turn; /* none may use the last one's room again */
                if (GMM__LATER) { /* what still goes out of there */
                    if (tid == 0) asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
                    gmm_bar_half(wg);
                }
                if (GMM__RAGGED) gmm_sm90_room_wait(held, turn);
#pragma unroll
                for (j = 0; j < GMM__OF(mb); j++) {
                    const int c0 = first + 64 * j;
                    const int plain = whole && t->cols - c0 >= 64, f4 = w * 4 + lane / 16, below = rows - tid / 16;
                    char *const put = mine + lane % 4 * 512 + lane / 4 % 4 * 4;
                    char *to = d + tid / 16 * pitch + (t->n0 + c0 + 4 * (tid % 16)) * size;
#pragma unroll
                    for (u = 0; u < GMM__OF(units); u += GMM__LOT / 16) {
                        const int room = (lot & 1) * (GMM__OF(room) >> GMM__RAGGED);
                        const char *const get = mine + room + tid / 16 * 256 +
                                                (((tid % 16) ^ (tid / 32 % 4 * 2)) << 4);
                        uint4 old[GMM__LOT / 8]; /* of what is added to: asked for first, all at once */
                        if (u >= units || c0 >= t->cols) break;
                        lot++;
#pragma unroll
                        for (x = 0; x < GMM__LOT / 8; x++) {
                            old[x] = make_uint4(0, 0, 0, 0);
                            if (plain && beta != 0.0f && !GMM__RAGGED && 16 * u + 8 * x < below)
                                old[x] = gmm_sm90_peek(size, to + 8 * x * pitch);
                        }
#pragma unroll
                        for (x = 0; x < GMM__LOT / 16; x++)
                            if (u + x < GMM__OF(units)) {
#pragma unroll
                                for (e = 0; e < 8; e++)
                                    *(float *)(put + room + x * 4096 + e / 4 * 2048 + e % 2 * 256 +
                                               (((f4 + e / 2 % 2 * 2) ^ (lane % 4 * 2)) << 4)) =
                                        sum[j][8 * (u + x) + e];
                            }
                        gmm_bar_half(wg);
                        if (plain) {
#pragma unroll
                            for (x = 0; x < GMM__LOT / 8; x++, to += 8 * pitch) {
                                const float4 f = *(const float4 *)(get + x * 2048);
                                float v[4];
                                v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
                                if (GMM__RAGGED && beta != 0.0f && 16 * u + 8 * x < below)
                                    old[x] = gmm_sm90_peek(size, to);
                                if (beta != 0.0f)
#pragma unroll
                                    for (e = 0; e < 4; e++)
                                        v[e] = __fmaf_rn(beta, gmm_sm90_seen(args.p.d.dtype, &old[x], e), v[e]);
                                if (16 * u + 8 * x < below) gmm_write4(args.p.d.dtype, to, 4, 1, v);
                            }
                        } else {
#pragma unroll 1
                            for (x = 0; x < GMM__LOT / 8; x++, to += 8 * pitch)
#pragma unroll 1
                                for (e = 0; e < 4 && e < t->cols - c0 - 4 * (tid % 16) && 16 * u + 8 * x < below;
                                     e++) {
                                    float v[4], was[4];
                                    v[0] = ((const float *)(get + x * 2048))[e];
                                    gmm_read4(args.p.d.dtype, to + e * size, beta != 0.0f, 0, was);
                                    if (beta != 0.0f) v[0] = __fmaf_rn(beta, was[0], v[0]);
                                    gmm_write4(args.p.d.dtype, to + e * size, 1, 0, v);
                                }
                        }
                    }
                }
                if (GMM__RAGGED)
                    for (lot = gmm_sm90_parts(t, size); lot > 0; lot--, turn++) {
                        gmm_sm90_room_wait(held, turn);
                        gmm_sm90_room_written(held, turn);
                    }
                else turn = lot;
            }
            if (GMM__RAGGED) gmm_bar_turn(wg ^ 1, 0);
        }
    }
    if (GMM__LATER && tid == 0) asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}
#endif

#ifndef GMM__FIRST
GMM__KERNEL GMM__SM90_BOUNDS(GMM__OF(blocks)) GMM__NAME(const __grid_constant__ GMM__ARGS args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char gmm_shared[];
    gmm_sm90_tile *const ring = (gmm_sm90_tile *)(gmm_shared + GMM__OF(ring));
    gmm_sm90_tile *const none = ring + GMM_SM90_RING;       /* that nobody multiplies */
    int32_t *const other = (int32_t *)(none + 1);           /* whether the kernel's other tile was taken */
    int32_t *const low = other + 1;                         /* whether all tiles are low: see GMM__LOW */
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const uint32_t bars = base + GMM__OF(bars);             /* of stages: filled, empty */
    const uint32_t told = bars + 16 * GMM__OF(stages);      /* of the ring */
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    uint32_t pair, rank, i;

    gmm_sm90_warm((const uint32_t *)&args.p, (int)(sizeof args - offsetof(gmm_sm90_args, p)), warp);
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(pair));
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {
#pragma unroll
        for (i = 0; i < GMM__OF(stages); i++) {
            gmm_bar_init(bars + 16 * i, GMM__OF(of) ? 33 : 1); /* the producer, and threads that bring scales */
            gmm_bar_init(bars + 16 * i + 8, 4 * GMM__OF(teams) * pair); /* warps that multiply what it held */
        }
#pragma unroll
        for (i = 0; i < GMM_SM90_RING; i++) gmm_bar_init(told + 8 * i, 1);
#pragma unroll
        for (; i < GMM_SM90_RING + GMM_SM90_BATCHES; i++) /* read by who multiply, move operands and D, bring scales */
            gmm_bar_init(told + 8 * i, 9 + (GMM__RAGGED ? 2 : 0) + (GMM__OF(of) ? 1 : 0));
#pragma unroll
        for (; i < GMM_SM90_RING + GMM_SM90_BATCHES + 2; i++) gmm_bar_init(told + 8 * i, 4); /* warps of a group */
#pragma unroll
        for (; i < GMM_SM90_RING + GMM_SM90_BATCHES + 10; i++) /* rooms of D: free, written to */
            gmm_bar_init(told + 8 * i, i % 2 ? (GMM__RAGGED ? 4 : 128) : GMM__RAGGED ? 2 : 1);
        asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
        asm volatile("prefetch.tensormap [%0];" : : "l"(&args.a) : "memory");
        asm volatile("prefetch.tensormap [%0];" : : "l"(&args.b) : "memory");
    }
    if (threadIdx.x == 256) {
        const gmm_sm90_tile empty = { 0, 0, 0, 0, 0, 0, 0, 64, 0, 0 };
        *none = empty;
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory"); /* the fence is what releases */
    if (warp != GMM__PLACER) { /* who places tiles begins with that */
        asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
        if (warp != 8) asm volatile("griddepcontrol.wait;" : : : "memory");
        asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
    }

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(GMM__OF(blocks) == 1 ? 40 : 48));
        if (warp == GMM__PLACER) { /* places tiles: several at once, a lane each */
            int32_t *const ends = args.tables ? args.tables + (int64_t)blockIdx.x * 2 * (args.p.groups + 1)
                                              : low + 1;
            int32_t *const items = ends + args.p.groups + 1;
            int32_t most = 0, across = 0, g = 0, count;
            int early = !args.tables && (!GMM__RAGGED || !(args.p.frozen || args.p.beta));
            uint32_t turn;
            for (turn = 0;; turn += (uint32_t)count) {
                const int32_t hop = (int32_t)(gridDim.x / pair);
                gmm_sm90_tile *const to = &ring[(turn + (uint32_t)lane) % GMM_SM90_RING];
                int stands = 0;
                count = turn == 0 ? 1 : turn == 1 ? GMM_SM90_BATCH - 1 : GMM_SM90_BATCH;
                if (turn == 0) { /* first by what the split says before it is waited for, into shared memory only */
                    if (!early) {
                        asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
                        asm volatile("griddepcontrol.wait;" : : : "memory");
                    }
                    stands = !early && most && gmm_sm90_stands(&args.groups, ends);
                    if (!stands) {
                        const gmm_sm90_sizes of = gmm_sm90_split(&args.groups, ends);
                        if (lane == 0)
                            *low = of.longest <= GMM_SM90_LOW / 2 ||
                                   (of.longest <= GMM_SM90_LOW && 4 * ends[args.p.groups] >= 3 * of.longest * of.live);
                        most = GMM__RAGGED ? GMM__OF(units)
                             : gmm_sm90_height(&args.p, ends, of, GMM__WHICH, GMM__OF(teams) == 2 && !GMM__OF(of),
                                               GMM__OF(cols), GMM__OF(units), GMM__SECOND(cols), GMM__SECOND(units),
                                               other);
                        __syncwarp();
                        /* a division by a constant each, in place of one by a variable before the first tile */
                        across = GMM__ANY(*other, cols) == 256 ? (args.p.n + 255) / 256
                               : GMM__ANY(*other, cols) == 128 ? (args.p.n + 127) / 128
                                                               : (args.p.n + GMM__OF(cols) - 1) / GMM__OF(cols);
                        if (!GMM__RAGGED)
                            across = gmm_sm90_across(&args.p, across, 64, 16 * most, (int32_t)gmm_cluster_size(), of);
                        gmm_sm90_count(&args.p, GMM__RAGGED, GMM__ANY(*other, cols) == 128, across, 16, most,
                                       (int32_t)pair, ends, items);
                        g = 0;
                    }
                }
                if (!stands) {
                    int32_t item = (int32_t)(blockIdx.x / pair + turn * hop), mine = 0, n;
                    if (turn >= GMM_SM90_RING)
                        gmm_bar_wait(told + 8 * (GMM_SM90_RING + turn / GMM_SM90_BATCH % GMM_SM90_BATCHES),
                                     (turn / GMM_SM90_RING & 1) ^ 1);
                    for (n = 0; n < count; n++, item += hop) {
                        gmm_find_group32(items, args.p.groups, item, &g);
                        if (lane == n) mine = item, to->g = g;
                    }
                    if (lane < count) {
                        to->k = to->cols = to->units = 0; /* no more */
                        if (to->g < args.p.groups)
                            gmm_sm90_place(&args.p, GMM__RAGGED, ends, items, mine,
                                           !GMM__RAGGED || hop % (items[to->g + 1] - items[to->g]) == 0,
                                           GMM__ANY(*other, cols) == 128, across, GMM__RAGGED ? GMM__OF(cols) : 64, 16,
                                           most, GMM__STEP, (int32_t)gmm_cluster_size(), (int32_t)gmm_cluster_rank(),
                                           to);
                    }
                    __syncwarp();
                }
                if (early) early = count = 0;
                else {
                    if (lane < count) gmm_bar_arrive_here(told + 8 * ((turn + (uint32_t)lane) % GMM_SM90_RING));
                    if (__any_sync(0xFFFFFFFFu, lane < count && to->units == 0)) break;
                }
            }
            if (blockIdx.x == 0) gmm_sm90_judge(&args.groups, &args.p, ends);
        }
        if (warp == 8) { /* moves A and B: each lane one box of every stage */
            uint32_t at = 0, turn;
            int dry = GMM__OF(teams) == 2; /* at first only to bring code and parameters to the caches */
            if (!dry) asm volatile("griddepcontrol.wait;" : : : "memory");
            for (turn = 0;; turn += !dry, dry = 0) {
                const gmm_sm90_tile *const t = dry ? none : &ring[turn % GMM_SM90_RING];
                gmm_sm90_box o;
                uint32_t depths, bytes, stage, step, half;
                __syncwarp();
                if (!dry) {
                    if (lane == 0) gmm_sm90_tile_read(told, turn);
                    gmm_bar_wait(told + 8 * (turn % GMM_SM90_RING), turn / GMM_SM90_RING & 1);
                    if (t->units == 0) break;
                }
                depths = gmm_sm90_depths(t->k);
                stage = (uint32_t)GMM__ANY(!dry && *other, stage);
                bytes = GMM__TA ? (uint32_t)(t->units + 3) / 4 * 8192 : (uint32_t)t->units * 2048;
                bytes += (uint32_t)gmm_sm90_boxes_b(t) * (GMM__OF(b) / (GMM__OF(cols) / 64));
                if (t->cols <= 0) bytes = 0;
                step = GMM__LOW(GMM__ANY(!dry && *other, cols)) && !dry && *low ? 2 : 1;
                half = (uint32_t)lane & (step - 1); /* neighbouring lanes ask for the same lines of two stages */
                gmm_sm90_aim(&args, GMM__RAGGED, GMM__TA, GMM__TB, GMM__ANY(!dry && *other, cols),
                             GMM__OF(b) / (GMM__OF(cols) / 64), lane >> (step - 1), rank, t, &o);
                if (half) o.x += 64;
                if (dry) {
                    asm volatile("" : : "r"(o.to), "l"(o.map), "r"(o.x), "r"(o.y), "r"(o.end), "r"(o.wrap), "r"(bytes));
                    asm volatile("griddepcontrol.wait;" : : : "memory");
                    continue;
                }
                for (; depths > 0; depths -= step, at += step) {
                    const uint32_t nth = at + half, s = nth % GMM__OF(stages), full = bars + 16 * s;
                    if (depths < step) step = 1; /* the last one */
                    if (half < step) {
                        gmm_bar_wait(full + 8, (nth / GMM__OF(stages) & 1) ^ 1);
                        if (lane == (int)half) gmm_bar_expect(full, bytes);
                    } else o.live = 0;
                    __syncwarp();
                    if (o.live)
                        gmm_tma_load(base + s * stage + o.to, o.map, full, o.both, o.x, o.y, o.end, o.wrap);
                    if (o.of_b ? GMM__TB : GMM__TA) o.y += 64;
                    else o.x += (o.of_b ? GMM__OF(box) : 64) * (int32_t)step;
                }
            }
            /* a block's shared memory must stand until its neighbour has arrived there for the last time */
            for (i = 0; i < GMM__OF(stages); i++, at++)
                gmm_bar_wait(bars + 16 * (at % GMM__OF(stages)) + 8, (at / GMM__OF(stages) & 1) ^ 1);
        }
        if (GMM__RAGGED && warp >= 10 && lane < 2) /* moves every other part of D */
            gmm_sm90_move(&args, ring, told, (uint32_t)warp - 10, told + 8 * (GMM_SM90_RING + GMM_SM90_BATCHES + 2),
                          base + GMM__OF(rooms));
        if (GMM__OF(of) && warp == 9)
            gmm_sm90_scales(&args, GMM__OF(of), GMM__OF(width), GMM__OF(stages), GMM__OF(stage),
                            base + GMM__OF(scales), bars, ring, told);
    } else {
        if (GMM__OF(blocks) == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        else asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
#ifdef GMM__OTHER
        gmm_bar_wait(told, 0);
        if (*(const volatile int32_t *)other) GMM__OTHERS(gmm9_multiply_)(args, gmm_shared, ring, base, bars, told);
        else
#endif
        GMM__PART(gmm9_multiply_)(args, gmm_shared, ring, base, bars, told);
    }
#endif
}
#endif
#undef GMM__LATER
#undef GMM__WAITS
#undef GMM__GOES
#undef GMM__ROOMS
#undef GMM__PLACER
#undef GMM__ROOM
#undef GMM__SETS
#undef GMM__STEP
#undef GMM__LOW
#undef GMM__MADE
#undef GMM__LOT
#undef GMM__RAGGED
#undef GMM__TB
#undef GMM__TA
#undef GMM__NAME
#undef GMM__ANY
#undef GMM__SECOND
#undef GMM__WHICH
#undef GMM__OTHERS
#undef GMM__PART
#undef GMM__OPS
#undef GMM__OF
#undef GMM__TILE
#undef GMM__OTHER
#undef GMM__FIRST


