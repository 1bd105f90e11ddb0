/* Which kernel serves a product of the WGMMA engine: the price of each, and the choice of the least. */

#ifdef __CUDACC__

/* Constants of the price models below, fitted on one H200. They order the kernels by speed and never change a result.
   "Step" is one k_tile of a tile: 64 elements of the contraction, FP8 128. "m16" and "m64" are rows in units of 16 and
   64; "n128" are columns in units of 128. A clock is one of the multiprocessor. Where the choice is known to be wrong
   stands in gmm_kernels/KERNELS.md. */
static const double gmm__wgmma_margin = 0.99;              /* share of the lowest cost below which a later one wins */
/* 16-bit operands: a step takes the clocks of its products or of its shared-memory traffic, whichever are more. */
static const double gmm__wgmma_mma_m16 = 64.0;             /* clocks per step, n128 and m16: wgmma */
static const double gmm__wgmma_packed_step = 1000.0;       /* clocks per step: instructions that dequantize B */
static const double gmm__wgmma_packed_m16 = 36.0;          /* clocks per step and m16, with packed B */
static const double gmm__wgmma_smem_b = 256.0;             /* clocks per step and n128: shared-memory traffic of B */
static const double gmm__wgmma_smem_a = 16.0;              /* clocks per step and m16, cooperative: traffic of A */
static const double gmm__wgmma_smem_a_n128 = 32.0;         /* clocks per step, m16 and n128, cooperative */
static const double gmm__wgmma_smem_a_pingpong = 43.4;     /* clocks per step and m16, ping-pong: traffic of A */
static const double gmm__wgmma_gather_m16 = 16.0;          /* clocks per step and m16: cp.async of gathered rows of A */
/* Slowdowns multiply the clocks of the mainloop. In ping-pong tiles few columns share a row of A, so that its traffic
   slows down long contractions. These constants and the costs of stores below were fitted to 926 products of plain
   operands in forward and dgrad, with contractions of 64 to 7168. Prices of packed weights, of gathered rows and of glu
   contain them too, and were not measured again. */
static const double gmm__wgmma_deferred_slowdown = 1.08;   /* tiles with a deferred store */
static const double gmm__wgmma_packed_slowdown = 1.05;     /* tiles of packed weights, few rows per group */
static const double gmm__wgmma_k_tiles_scale = 1250.0;     /* k_tiles that raise the ping-pong slowdown by 1 */
/* Store of a tile: hidden behind the mainloop of the next tile, or exposed. */
static const double gmm__wgmma_store_deferred = 27.0;      /* clocks per m16 and n128, 16 bits: deferred store */
static const double gmm__wgmma_store_undeferred = 240.0;   /* clocks per m16 that the next tile has too few steps for */
static const double gmm__wgmma_store_cooperative = 290.0;  /* clocks per m16 and n128, 16 bits */
static const double gmm__wgmma_store_pingpong = 700.0;     /* clocks per m16 and n128, 16 bits */
static const double gmm__wgmma_store_f32 = 2200.0;         /* clocks per m16 and n128, fp32 */
static const double gmm__wgmma_store_f32_block = 3200.0;   /* the same, divided by the blocks of a store slot */
static const double gmm__wgmma_fixed_cooperative = 880.0;  /* clocks per tile */
static const double gmm__wgmma_fixed_gather = 2500.0;      /* clocks per tile, added: the index before the first copy */
static const double gmm__wgmma_fixed_pingpong = 200.0;     /* clocks per tile */
/* Activations: fitted to 130 MLPs in 16 bits and 96 by blocks of FP8, their gradient to 209 MLPs in 16 bits, each with
   one launch and with two (tests/bench/joined.cu). The epilogue of a glu product takes the place of a ping-pong store,
   and slows the mainloop down besides. The mainloop of long contractions is not slowed down as in other ping-pong
   tiles. */
static const double gmm__wgmma_store_glu = 1700.0;         /* clocks per m16: store of D, activation, store of h */
static const double gmm__wgmma_store_glu_alone = 1000.0;   /* the same where D is not stored */
static const double gmm__wgmma_glu_m16 = 400.0;            /* clocks per m16 that are not hidden */
static const double gmm__wgmma_glu_alone_m16 = 300.0;      /* the same where D is not stored */
static const double gmm__wgmma_store_dglu = 2100.0;        /* clocks per m16: the gradient of the activation */
static const double gmm__wgmma_dglu_m16 = 1000.0;          /* clocks per m16 of it that are not hidden */
static const double gmm__wgmma_glu_width = 0.3;            /* of the time by which narrower tiles would be faster */
static const double gmm__wgmma_dglu_width = 0.2;           /* the same in dgrad */
static const double gmm__wgmma_act_rate = 1400.0;          /* bytes per clock: an activation, or its cast */
static const double gmm__wgmma_act_fixed = 7000.0;         /* clocks: its launch */
static const double gmm__wgmma_act_bwd_rate = 1700.0;      /* bytes per clock: the gradient of an activation */
static const double gmm__wgmma_shared_sm_slowdown = 1.2;   /* of tiles where two CTAs share a multiprocessor */
/* Memory traffic of the whole product. */
static const double gmm__wgmma_dequantize_rate = 400.0;    /* elements per clock: weights to 16 bits in the workspace */
static const double gmm__wgmma_copy_rate = 1900.0;         /* bytes per clock: gathered rows to the workspace */
static const double gmm__wgmma_weight_rate = 26.0;         /* bytes per clock and multiprocessor: weights from memory */
static const double gmm__wgmma_column_bytes = 128.0;       /* bytes of one column of a stage */
static const double gmm__wgmma_latency_bytes = 11000.0;    /* bytes in flight at which the weight rate is halved */
/* wgrad: TMA transfers D while wgmma runs, through the same memory system; the shorter of the two is partly hidden.
   Fitted to 500 measurements each of accumulation into fp32 and of 16-bit results. */
static const double gmm__wgmma_wgrad_smem_b = 190.0;       /* clocks per step and n128: shared-memory traffic of B */
static const double gmm__wgmma_wgrad_store_f32 = 800.0;    /* clocks per m16: D is read, added to and written */
static const double gmm__wgmma_wgrad_store_half = 236.0;   /* clocks per m16, 16 bits */
static const double gmm__wgmma_wgrad_tall_slowdown = 1.02; /* of the store of tiles above 8 m16 */
static const double gmm__wgmma_wgrad_mainloop = 1.35;      /* slowdown of the mainloop */
static const double gmm__wgmma_wgrad_pack = 63.0;          /* clocks per m16: accumulators to 16 bits */
static const double gmm__wgmma_wgrad_exposed = 0.26;       /* share of the shorter of the two that is not hidden */
/* FP8. Clocks of steps and tiles: gmm_fp8_stage_clocks, GMM_FP8_TILE_CLOCKS. */
static const double gmm__wgmma_fp8_load_column = 7.0;      /* clocks per step and column: weights from device memory */
static const double gmm__wgmma_fp8_glu_m64 = 3800.0;       /* clocks per m64 of a glu product: its epilogue */
static const double gmm__wgmma_fp8_glu_alone_m64 = 3300.0; /* the same where D is not stored */
static const double gmm__wgmma_fp8_prefetch_limit = 260e3; /* clocks of a product below which prefetch pays */
enum {
    GMM__WGMMA_CHOICE_ROWS = 256,  /* rows per group from which the device chooses between the tiles of a kernel */
    GMM__WGMMA_PACKED_ROWS = 2048  /* rows per group below which gmm__wgmma_packed_slowdown applies */
};

/* A product as the price models see it. Groups have equal sizes there. */
typedef struct gmm__wgmma_shape {
    gmm_gemm_op op;
    int64_t groups, rows, m, n; /* rows per group; extents of D per group */
    int64_t contraction;
    int64_t copied;             /* bytes per row of the copies of gathered rows */
    double weight_elements;
    int32_t processors;
    int gathers;                /* A has an index by which gather warps can load it */
    int f32, drops_d;           /* D is fp32; a glu product does not store D */
} gmm__wgmma_shape;

static gmm__wgmma_shape gmm__wgmma_shape_of(const gmm__call *call, gmm_gemm_op op, int32_t processors) {
    const int role_a = gmm__cuda_role_a(op), role_d = gmm__cuda_role_d(op);
    gmm__wgmma_shape s;
    s.op = op;
    s.groups = call->groups.count;
    s.rows = gmm__cuda_rows_per_group(call);
    s.m = op == gmm_gemm_wgrad ? call->out : s.rows;
    if (s.m < 1) s.m = 1;
    s.n = op == gmm_gemm_fwd ? call->out : call->in;
    s.contraction = op == gmm_gemm_wgrad ? s.rows : op == gmm_gemm_fwd ? call->in : call->out;
    s.copied = gmm__cuda_copy_pitch(call, role_a) + gmm__cuda_copy_pitch(call, gmm__cuda_role_b(op));
    s.weight_elements = (double)(s.groups * call->in) * (double)call->out;
    s.processors = processors;
    /* a gather warp counts rows in units of 16 bytes */
    s.gathers = gmm__cuda_index_of(call, role_a) &&
                (uint64_t)call->mat[role_a].ld / 8 * (uint64_t)call->d.linear.index_rows >> 32 == 0;
    s.f32 = call->mat[role_d].dtype == GMM_F32;
    s.drops_d = call->fused.drops_d;
    return s;
}

/* How tiles of a kernel cover D. */
typedef struct gmm__wgmma_tiling {
    int64_t tiles_m, tiles_n; /* tiles of a group along the rows and the columns of D */
    int64_t waves;            /* tiles that the busiest CTA computes */
} gmm__wgmma_tiling;

/* Tiles of tile_m x tile_n on `ctas` CTAs. narrows: where a group fits one tile, tiles are narrowed until the last wave
   is full (gmm_sm90_tiles_n): as many columns of tiles as all waves can hold, an even number. */
static gmm__wgmma_tiling gmm__wgmma_tiling_of(const gmm__wgmma_shape *s, int64_t tile_m, int64_t tile_n, int64_t ctas,
                                              int narrows) {
    gmm__wgmma_tiling t;
    int64_t filling;
    t.tiles_m = gmm__ceil_div(s->m, tile_m);
    t.tiles_n = gmm__ceil_div(s->n, tile_n);
    t.waves = gmm__ceil_div(s->groups * t.tiles_m * t.tiles_n, ctas);
    filling = t.waves * s->processors / s->groups / 2 * 2;
    if (narrows && t.tiles_m == 1 && filling > t.tiles_n) t.tiles_n = filling;
    return t;
}

/* Clocks of a step of a tile with m16 blocks of 16 rows. */
static double gmm__wgmma_step_clocks(const gmm_sm90_kernel *k, double m16) {
    const double n128 = k->tile_n / 128.0;
    const double mma = k->b_format ? gmm__wgmma_packed_step + gmm__wgmma_packed_m16 * m16
                                   : gmm__wgmma_mma_m16 * n128 * m16;
    const double smem_a = k->consumers == 2 ? gmm__wgmma_smem_a + gmm__wgmma_smem_a_n128 * n128
                                            : gmm__wgmma_smem_a_pingpong;
    const double smem_b = k->op == gmm_gemm_wgrad ? gmm__wgmma_wgrad_smem_b : gmm__wgmma_smem_b;
    const double smem = smem_b * n128 + smem_a * m16 + (k->gather ? gmm__wgmma_gather_m16 * m16 : 0.0);
    return mma > smem ? mma : smem;
}

/* Clocks of a tile of wgrad: a mainloop of k_tiles steps of `step` clocks, and the store of m16 blocks of 16 rows. */
static double gmm__wgmma_wgrad_tile_clocks(const gmm_sm90_kernel *k, double k_tiles, double step, double m16, int f32) {
    const double store = m16 * (f32 ? gmm__wgmma_wgrad_store_f32 : gmm__wgmma_wgrad_store_half) *
                         (k->m16 > 8 ? gmm__wgmma_wgrad_tall_slowdown : 1.0);
    const double mainloop = gmm__wgmma_wgrad_mainloop * k_tiles * step + (f32 ? 0.0 : gmm__wgmma_wgrad_pack * m16);
    return mainloop > store ? mainloop + gmm__wgmma_wgrad_exposed * store : store + gmm__wgmma_wgrad_exposed * mainloop;
}

/* What multiplies the clocks of a mainloop of forward or dgrad. */
static double gmm__wgmma_slowdown(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s, double k_tiles) {
    if (k->op == gmm_gemm_glu || k->op == gmm_gemm_dglu) return 1.0;
    if (k->consumers != 2) return 1.0 + k_tiles / gmm__wgmma_k_tiles_scale; /* ping-pong */
    if (k->deferred) return gmm__wgmma_deferred_slowdown;
    return k->b_format && s->rows < GMM__WGMMA_PACKED_ROWS ? gmm__wgmma_packed_slowdown : 1.0;
}
/* Clocks of storing a tile of forward or dgrad. A deferred store writes k->deferred blocks of rows in each step of the
   next tile, and the blocks that are left then at once; the fit counts those of a full tile for lower ones too. */
static double gmm__wgmma_store_clocks(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s, double k_tiles, double m16) {
    const double blocks = k->tile_n / 128.0 * m16; /* of 16 rows and 128 columns */
    const double left = k->m16 - k->deferred * k_tiles;
    if (k->op == gmm_gemm_glu) return m16 * (s->drops_d ? gmm__wgmma_store_glu_alone : gmm__wgmma_store_glu);
    if (k->op == gmm_gemm_dglu) return m16 * gmm__wgmma_store_dglu;
    if (s->f32) return blocks * (gmm__wgmma_store_f32 + gmm__wgmma_store_f32_block / k->store_blocks);
    if (k->deferred)
        return blocks * gmm__wgmma_store_deferred + (left > 0.0 ? gmm__wgmma_store_undeferred * left : 0.0);
    return blocks * (k->consumers == 2 ? gmm__wgmma_store_cooperative : gmm__wgmma_store_pingpong);
}
/* Clocks of one of `waves` tiles of a CTA. Consumers of a cooperative tile store it together. Of ping-pong tiles one is
   stored while the other is multiplied: a warp group has the time of two tiles for both. If the number of tiles is odd,
   one warp group has one more, and its time counts in glu and dglu products, whose epilogue is long. */
static double gmm__wgmma_tile_clocks(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s, double m16, int64_t waves) {
    const int fused = k->op == gmm_gemm_glu || k->op == gmm_gemm_dglu;
    const double turns = fused ? (double)(waves + waves % 2) / (double)waves : 1.0; /* of the busier warp group */
    const double k_tiles = (double)gmm__ceil_div(s->contraction, 64), step = gmm__wgmma_step_clocks(k, m16);
    const double mainloop = k_tiles * step * gmm__wgmma_slowdown(k, s, k_tiles);
    const double store = gmm__wgmma_store_clocks(k, s, k_tiles, m16), both = 0.5 * turns * (mainloop + store);
    const double glu = k->op == gmm_gemm_dglu ? gmm__wgmma_dglu_m16
                       : k->op != gmm_gemm_glu ? 0.0 : s->drops_d ? gmm__wgmma_glu_alone_m16 : gmm__wgmma_glu_m16;
    if (s->op == gmm_gemm_wgrad) return gmm__wgmma_wgrad_tile_clocks(k, k_tiles, step, m16, s->f32);
    if (k->consumers == 2)
        return mainloop + store + gmm__wgmma_fixed_cooperative + (k->gather ? gmm__wgmma_fixed_gather : 0.0);
    return (mainloop > both ? mainloop : both) + gmm__wgmma_fixed_pingpong + glu * m16;
}
/* Clocks of reading all weights from memory, whose rate grows with the bytes in flight. */
static double gmm__wgmma_weight_clocks(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s,
                                       const gmm__wgmma_tiling *t) {
    const double in_flight = gmm__wgmma_column_bytes * k->stages * (double)s->n / (double)t->tiles_n;
    return 2.0 * s->weight_elements / (gmm__wgmma_weight_rate * s->processors) *
           (1.0 + gmm__wgmma_latency_bytes / in_flight);
}
/* The price of a kernel with tiles of at most max_m16 blocks of 16 rows: the waves of its tiles times the clocks of a
   tile, and what copies of operands take before; or the clocks of reading all weights if they are more. b_format: of
   the weights, which other kernels do not read. */
static double gmm__wgmma_cost(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s, int32_t b_format, int32_t max_m16) {
    const gmm__wgmma_tiling t = gmm__wgmma_tiling_of(s, 16 * max_m16, k->tile_n, s->processors * k->ctas_per_sm, 1);
    const double m16 = (double)gmm__ceil_div(s->m, 16) / (double)t.tiles_m;
    const double tiles = (double)t.waves * gmm__wgmma_tile_clocks(k, s, m16, t.waves) *
                         (k->ctas_per_sm > 1 ? gmm__wgmma_shared_sm_slowdown : 1.0);
    const double dequantize = b_format && !k->b_format ? s->weight_elements / gmm__wgmma_dequantize_rate : 0.0;
    const double copy = k->gather ? 0.0 : (double)(s->rows * s->groups * s->copied) / gmm__wgmma_copy_rate;
    const double compute = tiles + dequantize + copy;
    const double weights = s->op == gmm_gemm_wgrad || b_format ? 0.0 : gmm__wgmma_weight_clocks(k, s, &t);
    return compute > weights ? compute : weights;
}

/* Index of the kernel for operation `kernel_op` that is estimated to be fastest, or -1. All kernels give the same bits.
   If it has two tiles, the device chooses between them by the group sizes (its row by_split), unless groups are so
   small that memory bandwidth bounds them. Packed weights are read by kernels of `b_format`; for other kernels the cost
   of their conversion is added.
   Where rows are gathered, kernels that do it themselves are among the choice, and to the cost of others that of a copy
   is added; without `copies` they are left out. *least becomes the cost of the choice, unless options.tile, which
   numbers the kernels that serve the call from 1, demands one. */
static int32_t gmm__wgmma_choose(const gmm__call *call, gmm_gemm_op op, gmm_gemm_op kernel_op, gmm_dtype dtype,
                                 int32_t b_format, int32_t processors, int copies, double *least) {
    const gmm__wgmma_shape s = gmm__wgmma_shape_of(call, op, processors);
    int32_t choice = -1, index = 0, i, max_m16;
    for (i = 0; i < GMM_SM90_KERNELS; i++) {
        const gmm_sm90_kernel *k = &gmm_sm90_kernels[i];
        /* the device may choose heights from min_m16 to k->m16 blocks of 16 rows; tiles of wgrad have one height */
        const int32_t min_m16 = op == gmm_gemm_wgrad ? k->m16 : k->m16 / 2 + 1;
        if (k->op != kernel_op || k->dtype != dtype || (k->b_format && k->b_format != b_format) ||
            (k->gather && !s.gathers) || (!k->gather && s.copied && !copies))
            continue;
        if (++index == call->options.tile) return i;
        if (k->tile_choice == gmm_sm90_tile_by_split) {
            if (s.rows >= GMM__WGMMA_CHOICE_ROWS && choice >= 0 && gmm_sm90_kernels[choice].function == k->function)
                choice = i;
            continue;
        }
        for (max_m16 = k->m16; max_m16 >= min_m16; max_m16--) {
            const double cost = gmm__wgmma_cost(k, &s, b_format, max_m16);
            if (choice >= 0 && cost >= gmm__wgmma_margin * *least) continue;
            *least = cost;
            choice = i;
        }
    }
    return choice;
}

/* Writes the tile of a kernel for plan->note, or the two tiles between which the device chooses, in the order of the
   kernel's name: the second one, then the first. Of two tiles with the same sizes, the one for short contractions is
   stored in fewer steps of the next tile. */
static const char *gmm__wgmma_tile_note(int32_t kernel, char text[64]) {
    const gmm_sm90_kernel *k = &gmm_sm90_kernels[kernel], *second = gmm_sm90_kernels;
    if (k->tile_choice == gmm_sm90_tile_by_split) {
        while (second->function != k->function || second->tile_choice != gmm_sm90_tile_second) second++;
        (void)snprintf(text, 64, "tile %d x %d or %d x %d, by the split", (int)second->m16 * 16, (int)second->tile_n,
                       (int)k->m16 * 16, (int)k->tile_n);
    } else
        (void)snprintf(text, 64, "tile %d x %d%s", (int)k->m16 * 16, (int)k->tile_n,
                       k->deferred && k->m16 / k->deferred < 8 ? ", short contraction" : "");
    return text;
}

#ifndef GMM_NO_QUANT
/* The same of an FP8 kernel, whose name has the first tile before the second. */
static const char *gmm__wgmma_fp8_tile_note(int32_t kernel, char text[64]) {
    const gmm_fp8_kernel *k = &gmm_fp8_kernels[kernel], *second = gmm_fp8_kernels;
    const int rows = GMM_FP8_BLOCK_ROWS;
    if (k->tile_choice == gmm_sm90_tile_by_split) {
        while (second->function != k->function || second->tile_choice != gmm_sm90_tile_second) second++;
        (void)snprintf(text, 64, "tile %d x %d or %d x %d, by the split", rows * k->consumers, (int)k->tile_n,
                       rows * second->consumers, (int)second->tile_n);
    } else (void)snprintf(text, 64, "tile %d x %d", rows * k->consumers, (int)k->tile_n);
    return text;
}
#endif

/* The operation of the kernels that serves an operation of the API. */
static gmm_gemm_op gmm__wgmma_op(gmm_op op) {
    return op == GMM_OP_LINEAR_FWD ? gmm_gemm_fwd : op == GMM_OP_LINEAR_DGRAD ? gmm_gemm_dgrad : gmm_gemm_wgrad;
}

#ifndef GMM_NO_QUANT
/* The price of an FP8 kernel in clocks: how often the busiest cluster computes two tiles at once, times the clocks of a
   mean tile. A step takes the clocks of its products or, where few rows share the weights, those of loading them:
   *loads becomes 1. A glu tile has two passes, and so covers twice its columns of D. */
static double gmm__wgmma_fp8_cost(const gmm_fp8_kernel *k, const gmm__wgmma_shape *s, int *loads) {
    const int32_t passes = 1 + k->glu;
    const gmm__wgmma_tiling t = gmm__wgmma_tiling_of(s, GMM_FP8_BLOCK_ROWS * k->consumers, k->tile_n * passes,
                                                     s->processors, s->op != gmm_gemm_wgrad && k->tile_n == 192);
    const int64_t tiles = t.tiles_m * t.tiles_n; /* of a group */
    /* cluster tiles of all groups: gmm_sm90_count_work in 64 bits */
    const int64_t work = s->op == gmm_gemm_wgrad ? s->groups * ((tiles + 1) / 2) : (s->groups * tiles + 1) / 2;
    /* tiles divide the blocks of rows of a group evenly, but for `higher` tiles, which have one block more */
    const int64_t m64 = gmm__ceil_div(s->m, GMM_FP8_BLOCK_ROWS), higher = m64 % t.tiles_m;
    const double mma = passes / (double)t.tiles_m *
                       (double)gmm_fp8_group_clocks(k->tile_n, (int32_t)(m64 / t.tiles_m),
                                                    (float)(t.tiles_m - higher), (float)higher);
    /* one tile of each column loads the weights from memory; the other tiles_m - 1 find them in the L2 */
    const double load = gmm__wgmma_fp8_load_column * (double)s->n / (double)(t.tiles_n * t.tiles_m);
    const double epilogue = !k->glu ? 0.0 : s->drops_d ? gmm__wgmma_fp8_glu_alone_m64 : gmm__wgmma_fp8_glu_m64;
    *loads = mma < load;
    return ceil((double)work / (0.5 * s->processors)) *
           ((double)gmm__ceil_div(s->contraction, 128) * (mma > load ? mma : load) +
            epilogue * (double)m64 / (double)t.tiles_m + GMM_FP8_TILE_CLOCKS);
}

/* Index of the FP8 kernel that is estimated to be fastest, or -1. All kernels that promote their partial sums to fp32
   give the same bits. Where forward or dgrad takes a kernel with two tiles, the device chooses between them by the
   group sizes, which the host does not know. glu: among glu tiles; *least becomes the price. options.tile numbers the
   kernels that serve the call from 1. */
static int32_t gmm__wgmma_choose_fp8(const gmm__call *call, gmm_gemm_op op, gmm_dtype dtype, int32_t scaling, int glu,
                                     int32_t processors, double *least) {
    const gmm__wgmma_shape s = gmm__wgmma_shape_of(call, op, processors);
    int32_t choice = -1, index = 0, i;
    for (i = 0; i < GMM_FP8_KERNELS; i++) {
        const gmm_fp8_kernel *k = &gmm_fp8_kernels[i];
        int loads, prefetch;
        double cost;
        if (k->dtype != dtype || k->scaling != scaling || k->glu != glu) continue;
        if (++index == call->options.tile) return i;
        if (op == gmm_gemm_wgrad && k->tile_n == 192) continue; /* rarely the faster one: 11 of 200 products */
        if (k->tile_choice == gmm_sm90_tile_by_split) {
            if (op != gmm_gemm_wgrad && choice >= 0 && gmm_fp8_kernels[choice].function == k->function) choice = i;
            continue;
        }
        /* Tiles of products by blocks have two instances, but one of glu, which is for few tokens. The one with
           prefetch of the first tile saves 4 us per launch, and is up to 4% slower in long products. */
        cost = gmm__wgmma_fp8_cost(k, &s, &loads);
        prefetch = op != gmm_gemm_wgrad && (cost < gmm__wgmma_fp8_prefetch_limit || loads);
        if (scaling == GMM_FP8_1D2D && !k->glu && k->predicts_first_tile != prefetch) continue;
        if (choice >= 0 && cost >= gmm__wgmma_margin * *least) continue;
        *least = cost;
        choice = i;
    }
    return choice;
}
#endif /* GMM_NO_QUANT */

#endif /* __CUDACC__ */

