/* ================================================================================== Body: FP8 product on Hopper === */

#elif GMM__BODY == 11
#define GMM__OF(name) (int)GMM__CAT(gmm11_##name##_, GMM__TILE)
#define GMM__PART(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__TAG), _), GMM__SUMS), _), GMM__TILE)
#define GMM__NAME GMM__CAT(GMM__PART(gmm_linear_), _sm90)
#define GMM__KIND (int)GMM__CAT(gmm11_sums_, GMM__SUMS)
#define GMM__ROWS_FACTORS (GMM__OF(teams) * (int)GMM__CAT(gmm11_group_, GMM__SUMS)) /* bytes of the rows' scales */
#define GMM__FACTORS (GMM__ROWS_FACTORS + (int)GMM__CAT(gmm11_all_, GMM__SUMS) + \
                      (int)GMM__CAT(gmm11_col_, GMM__SUMS) * GMM__OF(cols)) /* and of all of a stage */
#define GMM__LINES (256 + 4 * GMM__OF(cols)) /* bytes of lines' scales */
#define GMM__STEP (GMM__OF(cols) == 128 ? 128 : 64) /* of tiles: scales change at multiples of 128, and not in all */
#define GMM__SUM (GMM__OF(cols) / 2)       /* sums per thread: 64 rows by the tile's columns */
#define GMM__MULTIPLY(op) GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), op)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Sends for the product of stage `s`: 64 rows by the tile's columns. */
GMM__DEVICE void GMM__PART(gmm11_send_)(float *to, uint32_t lines, uint32_t columns, uint32_t s) {
    const uint32_t x = lines + s * (GMM__OF(stage) >> 4), y = columns + s * (GMM__OF(stage) >> 4);
    int kk;
    gmm_wgmma_fence();
#pragma unroll
    for (kk = 0; kk < 4; kk++)
        if (GMM__KIND == GMM_FP8_FAST || kk > 0)
            GMM__MULTIPLY(add)(GMM__OF(cols) / 8, to, gmm_wgmma_whole(x + kk * (32 >> 4)),
                               gmm_wgmma_whole(y + kk * (32 >> 4)));
        else GMM__MULTIPLY(set)(GMM__OF(cols) / 8, to, gmm_wgmma_whole(x), gmm_wgmma_whole(y));
    gmm_wgmma_commit();
}

/* The sums of 64 rows of a tile for a group of 128 threads: `depths` stages from number *at on. `lines` and `columns`
   are the descriptors of its rows and of the tile's columns in stage 0; `factors` is where the scale of the thread's
   first row stands there, 0: all are 1; `odd`: the second block of columns begins with the tile's 64th, else with its
   128th. `turn`: the group, 0 or 1, if two take turns at products, so that one adds up while the other multiplies;
   else -1. */
GMM__DEVICE void GMM__PART(gmm11_sum_)(float sum[GMM__SUM], uint32_t depths, uint32_t lines, uint32_t columns,
                                       uint32_t bars, uint32_t pair, uint32_t factors, int odd, int turn,
                                       uint32_t *at) {
    const uint32_t lane = threadIdx.x & 31, end = *at + depths;
    uint32_t q = *at, s;
#if GMM__FAST
    (void)factors;
    (void)odd;
    (void)turn;
#pragma unroll 1
    for (; q != end; q++) {
        s = __shfl_sync(0xFFFFFFFFu, q % GMM__OF(stages), 0);
        gmm_bar_wait(bars + 16 * s, q / GMM__OF(stages) & 1);
        GMM__PART(gmm11_send_)(sum, lines, columns, s);
        GMM__WGMMA_WAIT(1);
        if (q != *at && lane < pair) gmm_bar_arrive(bars + 16 * ((q - 1) % GMM__OF(stages)) + 8, lane);
    }
    GMM__WGMMA_WAIT(0);
    if (lane < pair) gmm_bar_arrive(bars + 16 * ((q - 1) % GMM__OF(stages)) + 8, lane);
#else
    const uint32_t blocks = bars - GMM__OF(bars) + GMM__OF(factors) + GMM__ROWS_FACTORS +
                            (GMM__KIND == GMM_FP8_BOTH ? lane % 4 * 16 : 0);
    float part[GMM__SUM];
    int u, e;
#pragma unroll 1
    for (; q != end; q++) {
        float f[GMM__OF(cols) == 128 ? 1 : 3][2], by[4][4], a[2] = { 1.0f, 1.0f }, b[2] = { 1.0f, 1.0f };
        s = __shfl_sync(0xFFFFFFFFu, q % GMM__OF(stages), 0);
        gmm_bar_wait(bars + 16 * s, q / GMM__OF(stages) & 1);
        if (GMM__KIND == GMM_FP8_BOTH && turn >= 0) gmm_bar_turn(turn, 1);
        GMM__PART(gmm11_send_)(part, lines, columns, s);
        GMM__WGMMA_WAIT(1); /* of one: or ptxas has products wait for scales that are asked for between them */
        if (factors) {
            a[0] = gmm_shared_read(factors + s * GMM__FACTORS);
            a[1] = gmm_shared_read(factors + s * GMM__FACTORS + 32);
            if (GMM__KIND == GMM_FP8_ROWS) gmm_shared_read2(blocks + s * GMM__FACTORS, b);
        }
        if (GMM__KIND == GMM_FP8_BOTH) {
#pragma unroll
            for (u = 0; u < 4; u++) gmm_shared_read4(blocks + s * GMM__FACTORS + 64 * u, by[u]);
        }
#pragma unroll
        for (e = 0; e < 2; e++) {
            f[0][e] = GMM__KIND == GMM_FP8_ROWS ? __fmul_rn(a[e], b[0]) : a[e];
            if (GMM__OF(cols) != 128) {
                f[GMM__OF(cols) / 64 - 1][e] = GMM__KIND == GMM_FP8_ROWS ? __fmul_rn(a[e], b[1]) : a[e];
                f[GMM__OF(cols) / 128][e] = odd ? f[GMM__OF(cols) / 64 - 1][e] : f[0][e];
            }
        }
        GMM__WGMMA_WAIT(0);
        if (GMM__KIND == GMM_FP8_BOTH && turn >= 0) gmm_bar_turn(turn ^ 1, 0);
#pragma unroll
        for (u = 0; u < GMM__SUM; u++) asm volatile("" : "+f"(part[u]) : : "memory");
        if (GMM__KIND != GMM_FP8_BOTH) { /* all of the warp have read the stage's scales */
            __syncwarp();
            if (lane < pair) gmm_bar_arrive(bars + 16 * s + 8, lane);
        }
#pragma unroll
        for (u = 0; u < GMM__SUM / 8; u++) { /* 16 columns */
#pragma unroll
            for (e = 0; e < 8; e++) {
                const float row = f[GMM__OF(cols) == 128 || GMM__KIND == GMM_FP8_BOTH ? 0 : u / 4][e / 2 % 2];
                sum[8 * u + e] = __fmaf_rn(part[8 * u + e], GMM__KIND == GMM_FP8_ROWS ? row
                                           : __fmul_rn(row, by[u % 4][e / 4 * 2 + e % 2]), sum[8 * u + e]);
            }
            if (GMM__KIND == GMM_FP8_BOTH && u + 4 < GMM__SUM / 8)
                gmm_shared_read4(blocks + s * GMM__FACTORS + 64 * (u + 4), by[u % 4]);
        }
        if (GMM__KIND == GMM_FP8_BOTH) {
            __syncwarp();
            if (lane < pair) gmm_bar_arrive(bars + 16 * s + 8, lane);
        }
    }
#endif
    *at = end;
}
#endif

GMM__KERNEL GMM__FP8_BOUNDS GMM__NAME(const __grid_constant__ gmm_fp8_args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char gmm_shared[];
    gmm_fp8_tile *const ring = (gmm_fp8_tile *)(gmm_shared + GMM__OF(ring));
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const uint32_t bars = base + GMM__OF(bars);             /* of stages: filled, empty */
    const uint32_t told = bars + 16 * GMM__OF(stages);      /* of the ring: written, */
    const uint32_t taken = told + 8 * GMM_SM90_RING;        /* read by the warp that moves operands */
    const uint32_t vacant = taken + 8 * GMM_SM90_RING;       /* of rooms: may be written to, have been written to */
    const uint32_t likely = vacant + 16 * GMM__OF(teams);    /* of the first tile: guessed, the neighbour's looked at */
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const int guess = GMM__OF(guess) && !args.wgrad && args.p.groups <= 32 * GMM_FP8_RUN;
    const int scaled = GMM__FACTORS && args.a_scale.scaling == GMM_SCALING_1X128; /* block by block */
    uint32_t pair, rank, i;

    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(pair));
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    for (i = threadIdx.x; i < GMM__LINES / 4 * GMM__OF(teams); i += blockDim.x) /* what is not by line stays 1 */
        ((float *)(gmm_shared + GMM__OF(lines)))[i] = 1.0f;
    if (threadIdx.x == 0) {
#pragma unroll
        for (i = 0; i < GMM__OF(stages); i++) {
            gmm_bar_init(bars + 16 * i, scaled ? 33 : 1); /* the producer, and lanes that bring scales */
            gmm_bar_init(bars + 16 * i + 8, 4 * GMM__OF(teams) * pair); /* warps that multiply what it held */
        }
#pragma unroll
        for (i = 0; i < 2 * GMM_SM90_RING; i++) gmm_bar_init(told + 8 * i, 1);
#pragma unroll
        for (i = 0; i < 2 * GMM__OF(teams); i++) gmm_bar_init(vacant + 8 * i, i % 2 ? 128 : GMM__OF(boxes));
        if (GMM__OF(guess)) {
            gmm_bar_init(likely, 1);
            gmm_bar_init(likely + 8, 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
        asm volatile("prefetch.tensormap [%0];" : : "l"(&args.a) : "memory");
        asm volatile("prefetch.tensormap [%0];" : : "l"(&args.b) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
    if (!guess || warp != 4 * GMM__OF(teams) + 2)
        asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
    if (warp != 4 * GMM__OF(teams) + 2 && !(guess && warp == 4 * GMM__OF(teams)))
        asm volatile("griddepcontrol.wait;" : : : "memory");
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");

    if (warp >= 4 * GMM__OF(teams)) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(GMM__OF(low)));
        if (warp == 4 * GMM__OF(teams) + 2) { /* places tiles, up to half a ring ahead of what is moved */
            int32_t *const ends = args.tables ? args.tables + (int64_t)blockIdx.x * 3 * (args.p.groups + 1)
                                              : (int32_t *)(ring + GMM_SM90_RING);
            int32_t *const items = ends + args.p.groups + 1, *const starts = items + args.p.groups + 1;
            const int32_t hop = (int32_t)(gridDim.x / pair);
            int32_t item = (int32_t)(blockIdx.x / pair), across = 0, early;
            int wrong = 0, open = guess;
            uint32_t tile = 0;
            gmm_fp8_tile f;
            /* What the split says is read before it is waited for, and again if that was old. Only shared memory may be
               written to then. */
            if (guess) {
#pragma unroll 1
                for (early = 1; early >= 0; early--) {
                    int32_t tiles;
                    if (args.p.groups <= 32)
                        tiles = gmm_fp8_plan(&args, 1, !early, GMM__OF(cols) == 128, GMM__OF(cols), GMM__STEP,
                                             GMM__OF(teams), (int32_t)gmm_cluster_size(), ends, items, starts);
                    else
                        tiles = gmm_fp8_plan(&args, GMM_FP8_RUN, !early, GMM__OF(cols) == 128, GMM__OF(cols), GMM__STEP,
                                             GMM__OF(teams), (int32_t)gmm_cluster_size(), ends, items, starts);
                    if (tiles) across = tiles;
                    if (!early) break;
                    gmm_fp8_first(&args, ends, items, starts, GMM__OF(cols) == 128, across, GMM__STEP, GMM__OF(teams),
                                  (int32_t)gmm_cluster_size(), (int32_t)gmm_cluster_rank(), &f);
                    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory"); /* barriers stand */
                    if (lane == 0) {
                        ring[GMM_SM90_RING - 1] = f;
                        gmm_bar_arrive_here(likely); /* its operands are asked for right behind the wait */
                    }
                    __syncwarp();
                    asm volatile("griddepcontrol.wait;" : : : "memory");
                }
            } else for (early = !args.tables && (!args.wgrad || !(args.p.frozen || args.p.beta)); early >= 0; early--) {
                if (!early) asm volatile("griddepcontrol.wait;" : : : "memory");
                if (across && gmm_sm90_stands(&args.groups, ends)) break;
                {
                    const gmm_sm90_sizes of = gmm_sm90_split(&args.groups, ends);
                    across = (args.p.n + GMM__OF(cols) - 1) / GMM__OF(cols);
                    if (!args.wgrad)
                        across = gmm_sm90_across(&args.p, across, GMM__STEP, GMM_FP8_UNIT * GMM__OF(teams),
                                                 (int32_t)gmm_cluster_size(), of);
                }
                gmm_sm90_count(&args.p, args.wgrad, GMM__OF(cols) == 128, across, GMM_FP8_UNIT, GMM__OF(teams),
                               (int32_t)gmm_cluster_size(), ends, items);
                gmm_fp8_starts(args.p.groups, ends, starts);
            }
            f.t.g = 0;
            for (;; item += hop, tile++) {
                const uint32_t before = tile - GMM_SM90_RING / 2;
                int32_t at = item;
                f.t.units = 0; /* no more */
                if (open && tile > 0 && at >= items[args.p.groups]) {
                    int others = 0;
                    open = 0;
                    if (gmm_cluster_size() > 1) {
                        gmm_bar_wait(likely + 8, 0);
                        others = *(volatile const int32_t *)(gmm_shared + (likely + 16 - base));
                    }
                    if (wrong || others) { /* one more tile for both */
                        gmm_fp8_nothing(&args, &f);
                        if (wrong) at = (int32_t)(blockIdx.x / pair);
                    }
                }
                if (at < items[args.p.groups]) {
                    gmm_find_group32(items, args.p.groups, at, &f.t.g);
                    gmm_sm90_place(&args.p, args.wgrad, ends, items, at,
                                   args.wgrad && hop % (items[f.t.g + 1] - items[f.t.g]) == 0, GMM__OF(cols) == 128,
                                   across, args.wgrad ? GMM__OF(cols) : GMM__STEP, GMM_FP8_UNIT, GMM__OF(teams),
                                   GMM_FP8_UNIT, (int32_t)gmm_cluster_size(), (int32_t)gmm_cluster_rank(), &f.t);
                    f.start = starts[f.t.g];
                    f.all = gmm_fp8_outer(&args, &f.t);
                    gmm_fp8_way_out(&args, &f);
                    if (guess && !open) f.t.share = 0;
                }
                if (guess && tile == 0) {
                    const gmm_fp8_tile *const first = &ring[GMM_SM90_RING - 1];
                    if (f.t.units == 0) gmm_fp8_nothing(&args, &f);
                    wrong = !gmm_fp8_right(&f, first);
                    __syncwarp();
                    if (wrong) gmm_fp8_nothing(&args, &f); /* what was multiplied does not go out */
                    if (lane == 0 && gmm_cluster_size() > 1)
                        gmm_fp8_confess(likely + 16, likely + 8, wrong);
                }
                if (tile >= GMM_SM90_RING / 2)
                    gmm_bar_wait(taken + 8 * (before % GMM_SM90_RING), before / GMM_SM90_RING & 1);
                if (lane == 0) {
                    ring[tile % GMM_SM90_RING] = f;
                    gmm_bar_arrive_here(told + 8 * (tile % GMM_SM90_RING));
                }
                if (f.t.units == 0) break;
            }
            if (blockIdx.x == 0) gmm_sm90_judge(&args.groups, &args.p, ends);
        } else if (warp == 4 * GMM__OF(teams)) { /* moves A and B: each lane one box of every stage */
            uint32_t at = 0, tile = 0;
            for (;; tile++) {
                uint32_t bytes, to, depths;
                int32_t boxes_b, box, x, y, end, wrap;
                const CUtensorMap *map;
                int live, both;
                const int first = guess && tile == 0;
                const gmm_fp8_tile *const f = &ring[first ? GMM_SM90_RING - 1 : tile % GMM_SM90_RING];
                gmm_bar_wait(first ? likely : told + 8 * (tile % GMM_SM90_RING), tile / GMM_SM90_RING & 1);
                if (f->t.units == 0) break;
                if (lane == 0) gmm_bar_arrive_here(taken + 8 * (tile % GMM_SM90_RING));
                /* the launch before may write addresses of weights */
                if (first && args.p.b.table) asm volatile("griddepcontrol.wait;" : : : "memory");
                depths = gmm_fp8_depths(f->t.k);
                boxes_b = (f->t.cols + 63) / 64;
                bytes = (uint32_t)(boxes_b + f->t.units) * 8192;
                live = lane < boxes_b + f->t.units;
                if (f->t.cols <= 0 || f->t.k == 0) live = 0, bytes = 0;
                x = args.wgrad ? f->start : 0;
                end = wrap = 0;
                if (lane < boxes_b) {
                    box = lane;
                    both = f->t.share == 1;
                    map = &args.b;
                    to = 8192 * box;
                    y = f->t.n0 + 64 * box;
                    if (!args.wgrad) {
                        const uint64_t from = (uint64_t)(uintptr_t)gmm_kmat_at(&args.p.b, f->t.g) - GMM_SM90_BASE;
                        end = (int32_t)(from >> 4 & 0x3FFF);
                        wrap = (int32_t)(from >> 18);
                    }
                } else {
                    box = lane - boxes_b;
                    both = f->t.share == 2;
                    map = &args.a;
                    to = GMM__OF(a) + 8192 * box;
                    y = f->t.m0 + 64 * box;
                    if (!args.wgrad) {
                        y += GMM_SM90_RAGGED - (f->t.end - f->t.row);
                        end = f->t.end;
                        wrap = GMM_SM90_RAGGED;
                    }
                }
                if (both && (box & 1) != (int)rank) live = 0;
                if (first) /* all of this is ready by then */
                    asm volatile("griddepcontrol.wait;" : "+r"(to), "+r"(y), "+r"(end), "+r"(wrap), "+r"(live),
                                 "+r"(bytes), "+r"(depths) : : "memory");
                for (; depths > 0; depths--, at++) {
                    const uint32_t s = at % GMM__OF(stages), full = bars + 16 * s;
                    gmm_bar_wait(full + 8, (at / GMM__OF(stages) & 1) ^ 1);
                    if (lane == 0) gmm_bar_expect(full, bytes);
                    if (live) gmm_tma_load(base + s * GMM__OF(stage) + to, map, full, both, x, y, end, wrap);
                    x += 128;
                }
            }
            /* a block's shared memory must stand until its neighbour has arrived there for the last time; what the
               neighbour brings has come before, and who places tiles has waited for its word */
#pragma unroll 1
            for (i = 0; i < GMM__OF(stages); i++, at++)
                gmm_bar_wait(bars + 16 * (at % GMM__OF(stages)) + 8, (at / GMM__OF(stages) & 1) ^ 1);
        } else if (warp == 4 * GMM__OF(teams) + 1 && scaled) { /* brings scales, columns' as sums stand */
            const uint32_t factors = base + GMM__OF(factors);
            uint32_t at = 0, tile = 0;
            int32_t x;
            for (;; tile++) {
                const int first = guess && tile == 0;
                const gmm_fp8_tile *const f = &ring[first ? GMM_SM90_RING - 1 : tile % GMM_SM90_RING];
                const float *rows, *cols;
                int64_t step, block;
                uint32_t depths;
                int32_t left, right, next_row, next_col;
                gmm_bar_wait(first ? likely : told + 8 * (tile % GMM_SM90_RING), tile / GMM_SM90_RING & 1);
                if (f->t.units == 0) break;
                depths = gmm_fp8_depths(f->t.k);
                left = f->t.k > 0 && f->t.cols > 0 ? f->t.rows - lane : 0;
                right = f->t.k > 0 ? f->t.cols - lane : 0;
                rows = gmm_fp8_scales_a(&args, f, &step) + f->t.m0 + lane;
                next_row = (int32_t)step;
                cols = gmm_fp8_scales_b(&args, f, &step, &block);
                next_col = (int32_t)step;
                if (GMM__KIND == GMM_FP8_BOTH) cols += f->t.n0 + lane;
                else { /* lane 1: of the columns behind the next multiple of 128, if there are */
                    const int32_t near = 128 - f->t.n0 % 128;
                    cols += (f->t.n0 / 128 + (lane == 1 && f->t.cols > near)) * block;
                }
                for (; depths > 0; depths--, at++) {
                    const uint32_t s = at % GMM__OF(stages), full = bars + 16 * s, to = factors + s * GMM__FACTORS;
                    gmm_bar_wait(full + 8, (at / GMM__OF(stages) & 1) ^ 1);
#pragma unroll
                    for (x = 0; x < 2 * GMM__OF(teams); x++)
                        gmm_fetch4(to + 4 * (uint32_t)lane + 128 * x, rows + 32 * x, 32 * x < left);
                    if (GMM__KIND == GMM_FP8_ROWS) {
                        if (lane < 2) gmm_fetch4(to + GMM__ROWS_FACTORS + 4 * (uint32_t)lane, cols, right > 0);
                    } else {
                        const uint32_t put = to + GMM__ROWS_FACTORS + (uint32_t)(lane / 16 * 64 + lane % 8 / 2 * 16 +
                                                                                 lane / 8 % 2 * 8 + lane % 2 * 4);
#pragma unroll
                        for (x = 0; x < GMM__OF(cols) / 32; x++)
                            gmm_fetch4(put + 128 * x, cols + 32 * x, 32 * x < right);
                    }
                    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(full) : "memory");
                    rows += next_row;
                    cols += next_col;
                }
            }
            asm volatile("cp.async.wait_all;" : : : "memory");
        } else if (warp == 4 * GMM__OF(teams) + 3 && lane < GMM__OF(teams) * GMM__OF(boxes))
            gmm_fp8_move(&args, GMM__OF(boxes), ring, told, vacant, base + GMM__OF(rooms));
    } else {
        float sum[GMM__SUM];
        uint32_t at = 0, tile = 0, turn = 0;
        int u, x, e;
        if (GMM__KIND == GMM_FP8_BOTH && threadIdx.x >= 128) gmm_bar_turn(0, 0); /* who begins */
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(GMM__OF(high)));
        for (;; tile++) {
            const int first = guess && tile == 0;
            const gmm_fp8_tile *f = &ring[first ? GMM_SM90_RING - 1 : tile % GMM_SM90_RING];
            const gmm_sm90_tile *t = &f->t;
            /* none of this is kept while sums fill the registers */
            const int wg = __shfl_sync(0xFFFFFFFFu, gmm_tid() >> 7, 0);
            const uint32_t lines = (uint32_t)gmm_wgmma_desc(base + GMM__OF(a) + 8192 * wg, 0);
            const uint32_t columns = (uint32_t)gmm_wgmma_desc(base, 0);
            uint32_t room;
            int rows, tid, row, out, per;
            float all, second = 1.0f;
            __syncwarp(); /* all lanes have read the last tile before one hands stages back, and with them its place */
            gmm_bar_wait(first ? likely : told + 8 * (tile % GMM_SM90_RING), tile / GMM_SM90_RING & 1);
            if (t->units == 0) break;
            if (t->cols <= 0 || t->units <= wg || t->k == 0) { /* nothing to multiply: hands the stages back */
                uint32_t depths = gmm_fp8_depths(t->k);
                for (; depths > 0; depths--, at++) {
                    const uint32_t s = at % GMM__OF(stages);
                    gmm_bar_wait(bars + 16 * s, at / GMM__OF(stages) & 1);
                    if ((threadIdx.x & 31) < pair) gmm_bar_arrive(bars + 16 * s + 8, threadIdx.x & 31);
                }
                __syncwarp();
                if (t->cols <= 0 || t->units <= wg) { /* nothing to take away either */
                    gmm_bar_wait(vacant + 16 * wg, turn++ & 1);
                    gmm_bar_arrive_here(vacant + 16 * wg + 8);
                    continue;
                }
            }
            tid = gmm_tid() & 127;
            if (args.a_scale.scaling == GMM_SCALING_ROW && tid < 64)
                gmm_fetch4(base + GMM__OF(lines) + GMM__LINES * wg + 4 * tid,
                           (const float *)args.a_scale.scale + t->m0 + 64 * wg + tid +
                               (args.wgrad ? (int64_t)t->g * args.p.m : t->row), 64 * wg + tid < t->rows);
            if (args.b_scale.scaling == GMM_SCALING_ROW)
#pragma unroll 1
                for (x = tid; x < GMM__OF(cols); x += 128)
                    gmm_fetch4(base + GMM__OF(lines) + GMM__LINES * wg + 256 + 4 * x,
                               (args.b_scale.scale_table ? (const float *)args.b_scale.scale_table[t->g]
                                                         : (const float *)args.b_scale.scale +
                                                               (int64_t)t->g * args.p.n) + t->n0 + x, x < t->cols);
#pragma unroll
            for (u = 0; u < GMM__SUM; u++) sum[u] = 0.0f;
            if (t->k > 0) {
                tid = gmm_tid();
                row = 64 * wg + (tid >> 5 & 3) * 16 + (tid & 31) / 4;
                GMM__PART(gmm11_sum_)(sum, gmm_fp8_depths(t->k), lines, columns, bars, pair,
                                      scaled ? base + GMM__OF(factors) + 4 * (uint32_t)row : 0, t->n0 % 128 != 0,
                                      t->units > 1 && (f->out & GMM_FP8_NARROW) ? wg : -1, &at);
            }
#pragma unroll
            for (u = 0; u < GMM__SUM; u++) asm volatile("" : "+f"(sum[u]) : : "memory");
            if (guess && tile == 0) { /* the split has been waited for meanwhile */
                gmm_bar_wait(told, 0);
                f = ring;
                t = &f->t;
                if (t->cols <= 0) {
                    asm volatile("cp.async.wait_all;" : : : "memory");
                    gmm_bar_wait(vacant + 16 * wg, turn++ & 1);
                    gmm_bar_arrive_here(vacant + 16 * wg + 8);
                    continue;
                }
            }
            tid = gmm_tid() & 127;
            row = tid / 32 * 16 + tid % 32 / 4; /* of the group's; and 8 below */
            rows = t->rows - 64 * wg;
            all = f->all;
            out = f->out;
            if (gmm_f32_bits(all) == GMM_FP8_EXTREME) all = gmm_fp8_outer_extreme(&args, t, &second);
            { /* scales of matrices and lines, bias */
                const uint32_t scales = base + GMM__OF(lines) + GMM__LINES * wg;
                const int by_row = args.a_scale.scaling == GMM_SCALING_ROW;
                const int by_col = args.b_scale.scaling == GMM_SCALING_ROW;
                if (by_row || by_col) {
                    asm volatile("cp.async.wait_all;" : : : "memory");
                    gmm_bar_team(wg);
                }
                if (by_row || by_col) {
                    const float s0 = gmm_shared_read(scales + 4 * row), s1 = gmm_shared_read(scales + 4 * row + 32);
#pragma unroll
                    for (u = 0; u < GMM__SUM; u += 4) {
                        float c[2];
                        gmm_shared_read2(scales + 256 + 8 * u + tid % 4 * 8, c);
                        c[0] = __fmul_rn(all, c[0]);
                        c[1] = __fmul_rn(all, c[1]);
                        sum[u] = __fmul_rn(__fmul_rn(sum[u], s0), c[0]);
                        sum[u + 1] = __fmul_rn(__fmul_rn(sum[u + 1], s0), c[1]);
                        sum[u + 2] = __fmul_rn(__fmul_rn(sum[u + 2], s1), c[0]);
                        sum[u + 3] = __fmul_rn(__fmul_rn(sum[u + 3], s1), c[1]);
                    }
                } else if (all != 1.0f) {
#pragma unroll
                    for (u = 0; u < GMM__SUM; u++) sum[u] = __fmul_rn(sum[u], all);
                }
                if (second != 1.0f) {
#pragma unroll
                    for (u = 0; u < GMM__SUM; u++) sum[u] = __fmul_rn(sum[u], second);
                }
                if (!args.wgrad && args.p.bias.dtype != GMM_NONE) {
                    const char *const bias = gmm_kmat_at(&args.p.bias, t->g);
                    const float *const row_scale = args.p.row_scale + t->row + t->m0 + 64 * wg;
                    const int given = args.p.row_scale ? rows : 0, bytes = gmm_kmat_size(&args.p.bias);
                    const int left = t->cols;
                    const float s0 = row < given ? row_scale[row] : 1.0f;
                    const float s1 = row + 8 < given ? row_scale[row + 8] : 1.0f;
#pragma unroll
                    for (u = 0; u < GMM__SUM; u += 4) {
                        const int c = 2 * u + tid % 4 * 2;
                        const int there = left - c > 2 ? 2 : left - c;
                        float v[4];
                        asm volatile("" : : : "memory"); /* loads stay where they are: registers are few */
                        gmm_read4(args.p.bias.dtype, bias + (int64_t)(t->n0 + c) * bytes, there, 0, v);
                        sum[u] = __fmaf_rn(v[0], s0, sum[u]);
                        sum[u + 1] = __fmaf_rn(v[1], s0, sum[u + 1]);
                        sum[u + 2] = __fmaf_rn(v[0], s1, sum[u + 2]);
                        sum[u + 3] = __fmaf_rn(v[1], s1, sum[u + 3]);
                    }
                }
            }
            /* from registers to the room, as 16-bit elements or as sums, and from there to D */
            room = base + GMM__OF(rooms) + 8192 * GMM__OF(boxes) * wg;
            per = out & GMM_FP8_NARROW ? 64 : 32; /* columns of a box */
#pragma unroll
            for (i = 0; i < GMM__OF(cols) / 32; i += GMM__OF(boxes)) { /* first box */
                const int c0 = (int)i * per;
                if (c0 >= t->cols || c0 >= GMM__OF(cols)) break;
                gmm_bar_wait(vacant + 16 * wg, turn++ & 1);
                if (out & GMM_FP8_NARROW) {
                    const gmm_dtype dtype = args.p.d.dtype;
                    const uint32_t put = room + (tid / 32 * 16 + tid % 16) * 128;
#pragma unroll
                    for (u = 0; u < 4 * GMM__OF(boxes); u++) { /* 16 columns */
                        const float *const v = &sum[32 * i + 8 * u < GMM__SUM ? 32 * i + 8 * u : 0];
                        if (32 * i + 8 * u >= GMM__SUM) break;
                        gmm_stmatrix(put + u / 4 * 8192 + (((u % 4 * 2 + tid % 32 / 16) ^ (tid % 8)) << 4),
                                     gmm_pack2(dtype, v[0], v[1]), gmm_pack2(dtype, v[2], v[3]),
                                     gmm_pack2(dtype, v[4], v[5]), gmm_pack2(dtype, v[6], v[7]));
                    }
                } else {
                    const int odd = row % 2; /* its halves of a box the other way round: no two threads share a bank */
                    const uint32_t put = room + row * 128 + tid % 2 * 8;
                    const int brought = (out & GMM_FP8_ADDED) && (i == 0 || !(out & GMM_FP8_REDUCED));
                    const float beta = brought ? gmm_gemm_beta(&args.p, t->g) : 0.0f;
#pragma unroll
                    for (x = 0; x < GMM__OF(boxes); x++) {
                        const float *const v = &sum[16 * (i + x)];
                        float w[16], old[16];
#pragma unroll
                        for (u = 0; u < 16; u++) w[u] = odd ? v[(u + 8) % 16] : v[u];
                        if (brought) {
#pragma unroll
                            for (u = 0; u < 16; u += 2)
                                gmm_shared_read2(put + x * 8192 + u % 4 * 512 +
                                                 (((u / 4 * 2 + tid % 4 / 2) ^ (row % 8) ^ (4 * odd)) << 4), old + u);
#pragma unroll
                            for (u = 0; u < 16; u++) w[u] = __fmaf_rn(beta, old[u], w[u]);
                        }
#pragma unroll
                        for (u = 0; u < 16; u += 2) /* 8 columns of the thread's two rows: four numbers */
                            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(put + x * 8192 + u % 4 * 512 +
                                         (((u / 4 * 2 + tid % 4 / 2) ^ (row % 8) ^ (4 * odd)) << 4)),
                                         "f"(w[u]), "f"(w[u + 1]) : "memory");
                    }
                }
                if (!(out & GMM_FP8_WHOLE)) { /* a thread per row and 16 bytes of it */
                    gmm_bar_team(wg);
                    const char *const from = gmm_shared + GMM__OF(rooms) + 8192 * GMM__OF(boxes) * wg;
                    const int size = gmm_kmat_size(&args.p.d);
                    const int64_t pitch = args.p.d.ld * size;
                    const float beta = gmm_gemm_beta(&args.p, t->g);
                    char *const d = gmm_kmat_at(&args.p.d, t->g) +
                                    (t->m0 + 64 * wg + (args.wgrad ? 0 : (int64_t)t->row)) * pitch;
                    const int near = (((uint32_t)(uintptr_t)d | (uint32_t)pitch) & (size == 2 ? 7 : 15)) == 0;
#pragma unroll 1
                    for (x = tid; x < 512 * GMM__OF(boxes); x += 128) {
                        const int r = x / 8 % 64, c = c0 + x / 512 * per + x % 8 * (per / 8), left = t->cols - c;
                        const char *const get = from + x / 512 * 8192 + r * 128 + (((x % 8) ^ (r % 8)) << 4);
                        char *const to = d + r * pitch + (int64_t)(t->n0 + c) * size;
                        if (r >= rows) continue;
                        if (out & GMM_FP8_NARROW) {
                            for (e = 0; e < 8 && e < left; e++) ((uint16_t *)to)[e] = ((const uint16_t *)get)[e];
                        } else {
                            const float4 w = *(const float4 *)get;
                            float v[4], was[4];
                            v[0] = w.x; v[1] = w.y; v[2] = w.z; v[3] = w.w;
                            if (beta != 0.0f) {
                                gmm_read4(args.p.d.dtype, to, left, near, was);
#pragma unroll
                                for (e = 0; e < 4; e++) v[e] = __fmaf_rn(beta, was[e], v[e]);
                            }
                            gmm_write4(args.p.d.dtype, to, left, near, v);
                        }
                    }
                }
                asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
                gmm_bar_arrive_here(vacant + 16 * wg + 8);
            }
        }
    }
#endif
}
#undef GMM__MULTIPLY
#undef GMM__SUM
#undef GMM__STEP
#undef GMM__LINES
#undef GMM__FACTORS
#undef GMM__ROWS_FACTORS
#undef GMM__KIND
#undef GMM__NAME
#undef GMM__PART
#undef GMM__OF
#undef GMM__TILE
#undef GMM__SUMS
#undef GMM__FAST


