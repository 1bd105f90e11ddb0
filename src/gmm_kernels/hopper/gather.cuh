/* Gathered rows of the 16-bit Hopper products (gmm_row_index), in tiles with `gather`. Where it is faster, the plan
   takes other tiles, and gmm_gather_rows copies the rows before the product.

   Two gather warps copy rows of A to the stage by cp.async, 16 bytes per lane, to the addresses at which TMA with
   128-byte swizzle would put them: byte 16 c of line l at 128 l + 16 (c ^ l % 8). Their lanes arrive at `full` when
   their copies have landed, besides the TMA boxes of B. cp.async writes through the generic proxy, so consumers
   fence the async proxy before wgmma reads the stage. Both CTAs of a cluster gather for themselves. */

/* A line without a row: zeros are written. */
#define GMM_SM90_NO_ROW 0xFFFFFFFFu

/* The line, of each 32, whose row this lane holds. Eight lanes copy a line together, so lanes 8 q to 8 q + 7 hold the
   rows of lines q, q + 4, ..., which they exchange by shuffles of constant lanes. */
GMM__DEVICE int32_t gmm_sm90_gather_line(void) {
    return (int32_t)(threadIdx.x & 7) * 4 + (int32_t)(threadIdx.x >> 3 & 3);
}

/* Copies 32 lines of 128 bytes to a stage. row: of this lane's line. from: the first byte of the lines in row 0; bytes:
   how many bytes of each line exist. Shuffles and addresses of four copies precede the copies, since a warp issues in
   order and would wait for each. */
GMM__DEVICE void gmm_sm90_gather_lines(uint32_t to, uint32_t row, const char *from, int32_t bytes) {
    const uint32_t lane = threadIdx.x & 31, chunk = lane & 7;
    const int32_t size = bytes - 16 * (int32_t)chunk; /* bytes of this lane's chunk, if it is the last one */
    int32_t i, u;
    to += 128 * (lane >> 3) + ((chunk ^ (lane >> 3)) << 4); /* the swizzle of lines 4 further is an XOR of 64 */
    from += 16 * chunk;
#pragma unroll
    for (i = 0; i < 8; i += 4) {
        uint32_t rows[4];
        const char *src[4];
#pragma unroll
        for (u = 0; u < 4; u++) rows[u] = __shfl_sync(0xFFFFFFFFu, row, i + u, 8);
#pragma unroll
        for (u = 0; u < 4; u++) src[u] = from + 16 * (uint64_t)rows[u];
        if (bytes >= 128 || bytes % 16 == 0)
#pragma unroll
            for (u = 0; u < 4; u++)
                gmm_cp_async_16_or_zeros((to ^ (u & 1 ? 64 : 0)) + 512 * (uint32_t)(i + u), src[u],
                                         rows[u] == GMM_SM90_NO_ROW || size <= 0);
        else
#pragma unroll
            for (u = 0; u < 4; u++)
                gmm_cp_async_16_zfill((to ^ (u & 1 ? 64 : 0)) + 512 * (uint32_t)(i + u), src[u],
                                      rows[u] == GMM_SM90_NO_ROW || size < 0 ? 0 : size < 16 ? size : 16);
    }
}

/* Gather warp `warp` of two, which copies every other 32 lines of A in every stage. a_offset: of A in a stage;
   most_lines: of the tile, a constant. */
GMM__DEVICE void gmm_sm90_gather_tiles(const gmm_sm90_args *args, const gmm_sm90_tile *ring, uint32_t bars,
                                       gmm_sm90_pipeline pipe, uint32_t stages_at, uint32_t a_offset, uint32_t warp,
                                       const int most_lines) {
    const int32_t lane = (int32_t)threadIdx.x & 31;
    uint32_t tile_index;
    for (tile_index = 0;; tile_index++) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        uint32_t rows[4]; /* of lines 64 i + 32 warp + gmm_sm90_gather_line(), in units of 16 bytes, since
                             gmm__wgmma_choose declines matrices of 64 GiB and more */
        int32_t x, k_end, lines;
        int64_t first; /* row of the product in line 0 */
        int i;
        __syncwarp();
        if (lane == 0) gmm_sm90_release_batch(bars, tile_index);
        gmm_sm90_wait_tile(bars, tile_index);
        if (t->row_blocks == 0) break;
        lines = t->cols > 0 ? t->rows : 0;
        first = (int64_t)t->row + t->m0;
        if (warp == 0 && t->n0 == 0)
            gmm_report_index_faults(&args->index, first + lane, first + lines, 32);
#pragma unroll
        for (i = 0; 64 * i < most_lines; i++) {
            const int32_t line = 64 * i + 32 * (int32_t)warp + gmm_sm90_gather_line();
            const int32_t row = line < lines ? gmm_indexed_row(&args->index, first + line) : -1;
            rows[i] = row < 0 ? GMM_SM90_NO_ROW : (uint32_t)(row * args->p.a.ld >> 3);
        }
        k_end = 64 * (int32_t)gmm_sm90_k_tiles(t->k);
        for (x = 0; x < k_end; x += 64, pipe.iter++) {
            const uint32_t s = pipe.iter % pipe.stages, to = stages_at + s * pipe.stage_bytes + a_offset;
            gmm_mbarrier_wait(gmm_sm90_empty(pipe.bars, s), (pipe.iter / pipe.stages & 1) ^ 1);
#pragma unroll
            for (i = 0; 64 * i < most_lines; i++)
                if (64 * i + 32 * (int32_t)warp < lines)
                    gmm_sm90_gather_lines(to + 4096 * (2 * (uint32_t)i + warp), rows[i],
                                          (const char *)args->p.a.data + 2 * (int64_t)x,
                                          args->p.k - x < 64 ? 2 * (args->p.k - x) : 128);
            gmm_cp_async_mbarrier_arrive(gmm_sm90_full(pipe.bars, s));
        }
    }
}
