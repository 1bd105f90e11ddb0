/* Brings what is added to, and takes D away, between D and the rooms of the groups of threads: one warp, a lane for
   each box of each room. A tile goes in parts, as many columns as a room holds. For each part a group hears (bars[0])
   that its room is free and holds what is added to, and tells (bars[1]) that it has left its sums there; once, too, for
   a tile of which it has none. */
GMM__DEVICE void gmm_fp8_move(const gmm_fp8_args *args, const int boxes, const gmm_fp8_tile *ring, uint32_t told,
                              uint32_t bars, uint32_t rooms) {
    const int lane = (int)threadIdx.x & 31, team = lane / boxes, box = lane % boxes;
    const uint32_t room = rooms + 8192 * (uint32_t)lane;
    uint32_t tile, turn = 0;
    bars += 16 * (uint32_t)team;
    for (tile = 0;; tile++) {
        const gmm_fp8_tile *const f = &ring[tile % GMM_SM90_RING]; /* stands until the group is two tiles further */
        int wide, cols, c = 0;
        gmm_bar_wait(told + 8 * (tile % GMM_SM90_RING), tile / GMM_SM90_RING & 1);
        if (f->t.units == 0) break;
        wide = f->out & GMM_FP8_NARROW ? 64 : 32;
        cols = f->t.units > team ? f->t.cols : 0;
        do {
            const int x = c + wide * box, next = x + wide * boxes, passes = (f->out & GMM_FP8_WHOLE) && x < cols;
            const int reduced = (f->out & GMM_FP8_REDUCED) && c > 0;
            const int32_t y = f->y + 64 * team;
            asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
            if (passes && (f->out & GMM_FP8_ADDED) && !reduced) {
                gmm_bar_expect(bars, 8192);
                gmm_tma_load(room, &args->d, bars, 0, f->t.n0 + x, y, f->z, f->w);
                if (next < cols && !(f->out & GMM_FP8_REDUCED))
                    gmm_tma_prefetch(&args->d, f->t.n0 + next, y, f->z, f->w);
            } else gmm_bar_arrive_here(bars);
            gmm_bar_wait(bars + 8, turn++ & 1);
            if (passes) {
                gmm_tma_store(&args->d, room, reduced, f->t.n0 + x, y, f->z, f->w);
                asm volatile("cp.async.bulk.commit_group;" : : : "memory");
            }
        } while ((c += wide * boxes) < cols);
    }
    asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}

#define GMM__BODY 11
#define GMM__TAG e4m3
#define GMM__SUMS rows
#define GMM__FAST 0
#define GMM__TILE 192x128
#include GMM_KERNELS_FILE
#define GMM__SUMS rows
#define GMM__FAST 0
#define GMM__TILE 192x128_few
#include GMM_KERNELS_FILE
#define GMM__SUMS rows
#define GMM__FAST 0
#define GMM__TILE 128x192_few
#include GMM_KERNELS_FILE
#define GMM__SUMS both
#define GMM__FAST 0
#define GMM__TILE 128x192_held
#include GMM_KERNELS_FILE
#define GMM__SUMS fast
#define GMM__FAST 1
#define GMM__TILE 128x192
#include GMM_KERNELS_FILE
#undef GMM__TAG
#define GMM__TAG e5m2
#define GMM__SUMS rows
#define GMM__FAST 0
#define GMM__TILE 192x128
#include GMM_KERNELS_FILE
#define GMM__SUMS rows
#define GMM__FAST 0
#define GMM__TILE 192x128_few
#include GMM_KERNELS_FILE
#define GMM__SUMS rows
#define GMM__FAST 0
#define GMM__TILE 128x192_few
#include GMM_KERNELS_FILE
#define GMM__SUMS both
#define GMM__FAST 0
#define GMM__TILE 128x192_held
#include GMM_KERNELS_FILE
#define GMM__SUMS fast
#define GMM__FAST 1
#define GMM__TILE 128x192
#include GMM_KERNELS_FILE
#undef GMM__TAG
#undef GMM__BODY

typedef struct gmm_fp8_kernel {
    gmm_dtype dtype;
    int32_t sums, teams, cols, shared, groups, guess;
    const void *function;
} gmm_fp8_kernel;

static const gmm_fp8_kernel gmm_fp8_kernels[] = {
#define GMM__X(dtype, tag, sums, tile) \
    { dtype, GMM__CAT(gmm11_sums_, sums), GMM__CAT(gmm11_teams_, tile), GMM__CAT(gmm11_cols_, tile), \
      gmm11_shared_##tag##_##sums##_##tile, GMM__CAT(gmm11_groups_, tile), GMM__CAT(gmm11_guess_, tile), \
      (const void *)gmm_linear_##tag##_##sums##_##tile##_sm90 },
    GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
};
enum { GMM_FP8_KERNELS = (int)(sizeof gmm_fp8_kernels / sizeof gmm_fp8_kernels[0]) };

/* Rows of a token matrix, ragged; a COLUMNWISE copy of tokens, `along` of them. */
static GMM__UNUSED int gmm_fp8_map_rows(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map, const gmm_kmat *m,
                                        int64_t features, int32_t box_lines) {
    const cuuint64_t pitch = (cuuint64_t)(m->ld * gmm_dtype_bits(m->dtype) / 8);
    cuuint64_t dims[4] = { 0, GMM_SM90_RAGGED, 0x7FFF0000, 0x7FFF0000 }, strides[3];
    dims[0] = (cuuint64_t)features;
    strides[0] = strides[1] = pitch;
    strides[2] = ((cuuint64_t)1 << 34) - pitch;
    return gmm_fp8_map(encode, map, m->dtype, m->data, dims, strides, box_lines);
}
static GMM__UNUSED int gmm_fp8_map_columns(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map,
                                           const gmm_kmat *m, int64_t along, int64_t lines, int32_t box_lines) {
    cuuint64_t dims[4] = { 0, 0, 1, 1 }, strides[3] = { 0, 16, 16 };
    dims[0] = (cuuint64_t)along;
    dims[1] = (cuuint64_t)lines;
    strides[0] = (cuuint64_t)m->ld;
    return gmm_fp8_map(encode, map, m->dtype, m->data, dims, strides, box_lines);
}

/* Encodes the maps and launches. `blocks` multiprocessors at most; all of `args` but the maps is given. Operands and
   their rows stand at multiples of 16 bytes. */
static GMM__UNUSED cudaError_t gmm_launch_fp8(PFN_cuTensorMapEncodeTiled_v12000 encode, int32_t kernel, int32_t blocks,
                                              gmm_fp8_args *args, cudaStream_t stream) {
    const gmm_fp8_kernel *row = &gmm_fp8_kernels[kernel];
    const gmm_gemm_args *p = &args->p;
    const int64_t rows = args->groups.capacity > 0 ? args->groups.capacity : 1; /* a map has no empty dimension */
    const int64_t padded = gmm_padded_capacity(p->groups, rows);
    const int pair = blocks > 1 ? 2 : 1;
    cudaLaunchConfig_t config = GMM_ZERO;
    cudaLaunchAttribute attributes[2];
    void *params[1];
    cudaError_t e;
    int mapped, device = 0, processors = 0;
    if (args->wgrad)
        mapped = gmm_fp8_map_columns(encode, &args->a, &p->a, padded, p->m, GMM_FP8_UNIT) &&
                 gmm_fp8_map_columns(encode, &args->b, &p->b, padded, p->n, 64);
    else
        mapped = gmm_fp8_map_rows(encode, &args->a, &p->a, p->k, GMM_FP8_UNIT) &&
                 gmm_fp8_map_memory(encode, &args->b, &p->b, p->k, p->n, 64);
    /* D whose rows do not stand at multiples of 16 bytes has no map, and the kernel finds that out for itself */
    if (mapped && p->d.ld * gmm_dtype_bits(p->d.dtype) % 128 == 0) {
        if (args->wgrad) mapped = gmm_fp8_map_memory(encode, &args->d, &p->d, p->n, p->m, GMM_FP8_UNIT);
        else if ((uintptr_t)p->d.data % 16 == 0)
            mapped = gmm_fp8_map_rows(encode, &args->d, &p->d, p->n, GMM_FP8_UNIT);
    }
    if (!mapped) return cudaErrorInvalidValue;
    memset(attributes, 0, sizeof attributes);
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = (unsigned)pair;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)(blocks / pair * pair));
    config.blockDim = dim3((unsigned)(128 * row->teams + 128));
    config.dynamicSmemBytes = (size_t)row->shared;
    config.stream = stream;
    config.attrs = attributes;
    /* where multiprocessors are to be left alone, no block of the next launch may wait on them */
    e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    config.numAttrs = blocks < processors / pair * pair ? 1 : 2;
    params[0] = args;
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(row->function, cudaFuncAttributeMaxDynamicSharedMemorySize, row->shared);
    return e == cudaSuccess ? cudaLaunchKernelExC(&config, row->function, params) : e;
}

