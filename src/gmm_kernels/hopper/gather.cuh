/* Gathered rows of the 16-bit Hopper products (gmm_row_index), in tiles with `gather`. Where it is faster, the plan
   takes other tiles, and gmm_gather_rows copies the rows before the product.

   Four gather warps copy rows of A to the stage by cp.async, to the addresses at which TMA with 128-byte swizzle would
   put them: byte 16 c of line l at 128 l + 16 (c ^ l % 8). Their lanes arrive at `full` when their copies have landed,
   besides the TMA boxes of B. cp.async writes through the generic proxy, so consumers fence the async proxy before
   wgmma reads the stage. Both CTAs of a cluster gather for themselves.

   A lane copies chunks of 16 bytes, 8 lanes a line, and a warp 4 lines at a time: of each block of 16 lines,
   lines 4 warp to 4 warp + 3. So the swizzle of a lane's chunks is the same in every block. */

/* A line without a row: zeros are written. */
#define GMM_SM90_NO_ROW 0xFFFFFFFFu

/* Copies this lane's chunks of a stage, one in each of the first `blocks` blocks of 16 lines. to: the chunk in block 0.
   rows: where the row of each line begins, in units of 16 bytes, or GMM_SM90_NO_ROW. from: the chunk of row 0. bytes:
   how many of its 16 exist; in a whole stage all do. All lanes of a warp copy in the same branch. On an H200, where
   some copied in one branch and some in another, `full` completed before all copies had landed; why is not known. */
GMM__DEVICE void gmm_sm90_gather_stage(uint32_t to, const uint32_t *rows, int32_t blocks, const int most_blocks,
                                       const char *from, int32_t bytes, const int whole_stage) {
    int i;
#pragma unroll
    for (i = 0; i < most_blocks; i++) {
        const char *const src = from + 16 * (uint64_t)rows[i];
        const int no_row = rows[i] == GMM_SM90_NO_ROW;
        if (whole_stage) gmm_cp_async_16_where(i < blocks, to + 2048 * (uint32_t)i, src, no_row);
        else if (i < blocks) gmm_cp_async_16_zfill(to + 2048 * (uint32_t)i, src, no_row ? 0 : bytes);
    }
}

/* Gather warp `warp`. a_offset: of A in a stage; most_blocks: of 16 lines in the tile, a constant. */
GMM__DEVICE void gmm_sm90_gather_tiles(const gmm_sm90_args *args, const gmm_sm90_tile *ring, uint32_t bars,
                                       gmm_sm90_pipeline pipe, uint32_t stages_at, uint32_t a_offset, uint32_t warp,
                                       const int most_blocks) {
    const uint32_t lane = threadIdx.x & 31, line = 4 * warp + lane / 8, chunk = lane & 7;
    const uint32_t chunk_at = stages_at + a_offset + 128 * line + ((chunk ^ (line & 7)) << 4);
    uint32_t tile_index;
    for (tile_index = 0;; tile_index++) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        uint32_t rows[16]; /* of lines 16 i + line; 32 bits suffice, since gmm__wgmma_shape_of offers these tiles for
                              matrices below 64 GiB alone */
        int32_t x, k_end, lines, blocks;
        int64_t first; /* row of the product in line 0 */
        int i;
        __syncwarp();
        if (lane == 0) gmm_sm90_release_batch(bars, tile_index);
        gmm_sm90_wait_tile(bars, tile_index);
        if (t->row_blocks == 0) break;
        lines = t->cols > 0 ? t->rows : 0;
        blocks = (lines + 15) / 16;
        k_end = 64 * (int32_t)gmm_sm90_k_tiles(t->k);
        first = (int64_t)t->row + t->m0;
        if (warp == 0 && t->n0 == 0) gmm_report_index_faults(&args->index, first + lane, first + lines, 32);
#pragma unroll
        for (i = 0; i < most_blocks; i++) {
            const int32_t l = 16 * i + (int32_t)line;
            const int32_t row = l < lines ? gmm_indexed_row(&args->index, first + l) : -1;
            rows[i] = row < 0 ? GMM_SM90_NO_ROW : (uint32_t)(row * args->p.a.ld >> 3);
        }
        for (x = 0; x < k_end; x += 64, pipe.iter++) {
            const uint32_t s = pipe.iter % pipe.stages, to = chunk_at + s * pipe.stage_bytes;
            const char *const from = (const char *)args->p.a.data + 2 * (int64_t)x + 16 * chunk;
            const int32_t bytes = 2 * (args->p.k - x) - 16 * (int32_t)chunk;
            gmm_mbarrier_wait(gmm_sm90_empty(pipe.bars, s), (pipe.iter / pipe.stages & 1) ^ 1);
            if (args->p.k - x >= 64) gmm_sm90_gather_stage(to, rows, blocks, most_blocks, from, 16, 1);
            else
                gmm_sm90_gather_stage(to, rows, blocks, most_blocks, from, bytes < 0 ? 0 : bytes < 16 ? bytes : 16, 0);
            gmm_cp_async_mbarrier_arrive(gmm_sm90_full(pipe.bars, s));
        }
    }
}
