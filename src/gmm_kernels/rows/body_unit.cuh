/* ========================================================================================= Bodies per copy unit === */

#elif GMM__BODY == GMM__BODY_UNIT
#define GMM__TAG GMM__COLUMN(1, GMM__ROW)
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)
#define GMM__UNIT GMM__NAME(gmm__unit)

/* Loads, stores or copies a segment of GMM__COPY_SPAN units of a row, four units per lane, so that all loads are
   issued before the first store. src NULL gives zeros. */
GMM__DEVICE void GMM__NAME(gmm__load_segment)(const GMM__UNIT *src, int64_t segment, int64_t units, GMM__UNIT v[4]) {
    const int64_t first = segment * GMM__COPY_SPAN + gmm__lane();
    int32_t j;
    memset(v, 0, 4 * sizeof *v);
#pragma unroll
    for (j = 0; j < 4; j++)
        if (src && first + 32 * j < units) v[j] = src[first + 32 * j];
}
GMM__DEVICE void GMM__NAME(gmm__store_segment)(GMM__UNIT *dst, int64_t segment, int64_t units, const GMM__UNIT v[4]) {
    const int64_t first = segment * GMM__COPY_SPAN + gmm__lane();
    int32_t j;
#pragma unroll
    for (j = 0; j < 4; j++)
        if (first + 32 * j < units) __stcs(dst + first + 32 * j, v[j]);
}
GMM__DEVICE void GMM__NAME(gmm__copy_segment)(const GMM__UNIT *src, GMM__UNIT *dst, int64_t segment, int64_t units) {
    GMM__UNIT v[4];
    GMM__NAME(gmm__load_segment)(src, segment, units, v);
    GMM__NAME(gmm__store_segment)(dst, segment, units, v);
}

/* Copies rows. A task is one segment of a row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 12)
GMM__NAME(gmm_copy)(const __grid_constant__ gmm__copy_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    for (; loop.row < a.rows; gmm__grid_loop_next(&loop))
        GMM__NAME(gmm__copy_segment)((const GMM__UNIT *)a.src + loop.row * a.src_ld,
                                     (GMM__UNIT *)a.dst + loop.row * a.dst_ld, loop.part, a.cols);
}

/* dst[r] = src[token of slot_of[r]], zeros in padding; row_probs[r] = probs[slot_of[r]]. A task is one segment of a
   row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 10)
GMM__NAME(gmm_permute_rows)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault), slots = a.tokens * a.topk;
    const int64_t rows = a.tail_zero ? a.capacity : valid_rows;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.hidden + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        const int32_t slot = loop.row < valid_rows ? gmm__map_entry(a.slot_of, loop.row, slots, a.fault) : -1;
        const int64_t token = (uint32_t)slot / (uint32_t)a.topk;
        GMM__NAME(gmm__copy_segment)(slot >= 0 ? (const GMM__UNIT *)a.src.data + token * a.src.ld : NULL,
                                     (GMM__UNIT *)a.dst.data + loop.row * a.dst.ld, loop.part, a.hidden);
        if (a.row_probs && loop.part == 0 && gmm__lane() == 0) a.row_probs[loop.row] = slot >= 0 ? a.probs[slot] : 0.0f;
    }
}

/* The same where row_of is given too: each token's row is read once and written to all of its rows. An entry
   of row_of counts only where slot_of agrees, so that any two maps give the result of gmm_permute_rows. Rows without
   such an entry, for example padding, are written last: a warp checks 32 rows at a time. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_permute_tokens)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t segments = (a.hidden + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN;
    const int64_t stride = (int64_t)gridDim.x * GMM__ELEM_BLOCK;
    const GMM__UNIT *src = (const GMM__UNIT *)a.src.data;
    GMM__UNIT *dst = (GMM__UNIT *)a.dst.data;
    const int32_t slots = (int32_t)(a.tokens * a.topk); /* fits 32 bits, since maps are int32 */
    int64_t base = (int64_t)blockIdx.x * GMM__ELEM_BLOCK + gmm__warp() * 32, valid_rows = -1;
    gmm__grid_loop loop = gmm__grid_loop_begin(segments, 1);
    for (; loop.row < a.tokens; gmm__grid_loop_next(&loop)) {
        GMM__UNIT v[4];
        int32_t i;
        GMM__NAME(gmm__load_segment)(src + loop.row * a.src.ld, loop.part, a.hidden, v);
        for (i = 0; i < a.topk; i += 32) {
            const int32_t choice = i + gmm__lane(), slot = (int32_t)loop.row * a.topk + choice;
            int32_t row = choice < a.topk ? a.row_of[slot] : -1;
            uint32_t pending;
            /* read after the first loads are issued */
            if (valid_rows < 0) valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault);
            if (row < 0 || row >= valid_rows || a.slot_of[row] != slot) row = -1;
            if (row >= 0 && loop.part == 0 && a.row_probs) a.row_probs[row] = a.probs[slot];
            for (pending = __ballot_sync(0xFFFFFFFFu, row >= 0); pending; pending &= pending - 1) {
                const int64_t dst_row = __shfl_sync(0xFFFFFFFFu, row, __ffs((int)pending) - 1);
                GMM__NAME(gmm__store_segment)(dst + dst_row * a.dst.ld, loop.part, a.hidden, v);
            }
        }
    }
    for (; base < a.capacity; base += stride) {
        const int64_t row = base + gmm__lane();
        int32_t slot, unmapped;
        uint32_t pending;
        if (valid_rows < 0) valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault);
        slot = row < valid_rows ? gmm__map_entry(a.slot_of, row, slots, a.fault) : -1;
        unmapped = row < (a.tail_zero ? a.capacity : valid_rows) && (slot < 0 || a.row_of[slot] != row);
        if (unmapped && a.row_probs) a.row_probs[row] = slot >= 0 ? a.probs[slot] : 0.0f;
        for (pending = __ballot_sync(0xFFFFFFFFu, unmapped); pending; pending &= pending - 1) {
            const int32_t lane = __ffs((int)pending) - 1, src_slot = __shfl_sync(0xFFFFFFFFu, slot, lane);
            const int64_t token = (uint32_t)src_slot / (uint32_t)a.topk;
            int64_t segment;
            for (segment = 0; segment < segments; segment++)
                GMM__NAME(gmm__copy_segment)(src_slot >= 0 ? src + token * a.src.ld : NULL,
                                             dst + (base + lane) * a.dst.ld, segment, a.hidden);
        }
    }
}

/* Copies row j of each group of src to row j of the group of dst; rows that src does not have become zeros. The
   first CTA also writes the padded sizes and reports a capacity fault. A task is one segment of a row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 12)
GMM__NAME(gmm_pad)(const __grid_constant__ gmm__pad_args a) {
    gmm_pdl_wait();
    const int64_t valid_rows = gmm__pad_start(&a, a.groups, a.pad), rows = a.tail_zero ? a.rows : valid_rows;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    if (blockIdx.x == 0) {
        int64_t g;
        for (g = threadIdx.x; a.sizes && g < a.groups; g += GMM__ELEM_BLOCK)
            a.sizes[g] = (int32_t)(gmm__pad_start(&a, g + 1, 1) - gmm__pad_start(&a, g, 1));
        if (threadIdx.x == 0 && a.blocks[a.groups] * a.align > a.capacity)
            gmm__fault(a.fault, (uint32_t)GMM_FAULT_CAPACITY);
    }
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        int64_t src_row = -1;
        if (loop.row < valid_rows) {
            const int64_t g = gmm__pad_group(&a, loop.row);
            src_row = gmm__pad_start(&a, g, !a.pad) + loop.row - gmm__pad_start(&a, g, a.pad);
            if (src_row >= gmm__pad_start(&a, g + 1, !a.pad)) src_row = -1;
        }
        GMM__NAME(gmm__copy_segment)(src_row >= 0 ? (const GMM__UNIT *)a.src.data + src_row * a.src.ld : NULL,
                                     (GMM__UNIT *)a.dst.data + loop.row * a.dst.ld, loop.part, a.cols);
        if (a.dst_prob && loop.part == 0 && gmm__lane() == 0)
            a.dst_prob[loop.row] = src_row >= 0 ? a.src_prob[src_row] : 0.0f;
    }
}

/* Permutes the 2 ffn rows of each of `count` matrices. A task is one segment of a row of dst. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_glu_rows)(const __grid_constant__ gmm__glu_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    for (; loop.row < a.count * 2 * a.ffn; gmm__grid_loop_next(&loop)) {
        const uint32_t g = loop.row / (2 * (uint32_t)a.ffn), dst_row = loop.row - g * 2 * (uint32_t)a.ffn;
        const int64_t src_row = gmm__glu_source(dst_row, (uint32_t)a.ffn, (uint32_t)a.block, a.inverse);
        const GMM__UNIT *src = a.src_table ? (const GMM__UNIT *)a.src_table[g]
                                           : (const GMM__UNIT *)a.src.data + g * a.src_stride;
        GMM__UNIT *dst = a.dst_table ? (GMM__UNIT *)a.dst_table[g] : (GMM__UNIT *)a.dst.data + g * a.dst_stride;
        GMM__NAME(gmm__copy_segment)(src + src_row * a.src.ld, dst + dst_row * a.dst.ld, loop.part, a.cols);
    }
}

/* Permutes the 2 ffn columns of a matrix of `count` rows. A task is one segment of a row: loads are gathered, stores
   are coalesced. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_glu_columns)(const __grid_constant__ gmm__glu_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin((2 * a.ffn + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    for (; loop.row < a.count; gmm__grid_loop_next(&loop)) {
        const GMM__UNIT *src = (const GMM__UNIT *)a.src.data + loop.row * a.src.ld;
        GMM__UNIT *dst = (GMM__UNIT *)a.dst.data + loop.row * a.dst.ld;
        const int64_t first = loop.part * GMM__COPY_SPAN + gmm__lane();
        GMM__UNIT v[4];
        int32_t j;
        memset(v, 0, sizeof v);
#pragma unroll
        for (j = 0; j < 4; j++)
            if (first + 32 * j < 2 * a.ffn)
                v[j] = src[gmm__glu_source((uint32_t)first + 32u * j, (uint32_t)a.ffn, (uint32_t)a.block, a.inverse)];
#pragma unroll
        for (j = 0; j < 4; j++)
            if (first + 32 * j < 2 * a.ffn) dst[first + 32 * j] = v[j];
    }
}

#undef GMM__UNIT
#undef GMM__NAME
#undef GMM__TAG
#undef GMM__ROW

