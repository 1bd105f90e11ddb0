/* gated_kernel - shows that the kernel body of Hopper's 16-bit products accepts the epilogues of a gated MLP, which the
   library does not have: SwiGLU after FC1, its derivative after FC2's dgrad. An epilogue reads rows of D from a store
   slot, rounded to 16 bits, so that h has the bits of the activation of z, whether z is stored or not. Gate and linear
   columns alternate in blocks of 8, that is in neighbouring 16-byte vectors. gated.cu runs it. */
#define GMM_IMPLEMENTATION
#define GMM_STATIC
#include "gmm.h" /* copy of the headers whose kernels are empty, made by empty.awk */

#include "gated.h"

/* Kernel arguments of instances with these epilogues. An operand with data NULL is not written; the same holds for
   p.d. */
typedef struct gated_args : gmm_sm90_args {
    gmm_kmat e, h, z;
    const float *prob;
    gmm_act_coef coef;
} gated_args;

/* The 16-byte vectors (8 columns) of a thread: in rows line, line + row_step, ... of the store slot. */
typedef struct gated_vectors {
    int vec, line, row_step;
    int64_t row, col; /* first row of the tile; first column of the vector in h */
    int live;         /* rows of the tile, 0 if the column is beyond the matrix */
} gated_vectors;

GMM__DEVICE gated_vectors gated_vectors_of(const gated_args *args, const gmm_sm90_tile *t, const int bytes,
                                           const int fold, int row, int first) {
    const int tid = gmm_tid_x() & 127;
    gated_vectors at;
    at.vec = tid % (bytes / 16);
    at.line = tid / (bytes / 16);
    at.row_step = 128 / (bytes / 16);
    at.row = t->row + t->m0;
    at.col = (t->n0 + first) / fold + 8 * at.vec;
    at.live = (t->cols - first) / fold > 8 * at.vec ? t->rows : 0;
    if (args->prob && row == 0 && 32 * (tid % 8) < t->rows) /* each warp prefetches those of the whole tile */
        asm volatile("prefetch.global.L1 [%0];"
                     : : "l"(__cvta_generic_to_global(args->prob + at.row + 32 * (tid % 8))));
    return at;
}
GMM__DEVICE uint4 *gated_address(const gmm_kmat *m, int64_t row, int64_t col) {
    return (uint4 *)((char *)m->data + (row * m->ld + col) * 2);
}
GMM__DEVICE void gated_unpack(uint4 v, float f[8]) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    int i;
#pragma unroll
    for (i = 0; i < 8; i++) f[i] = gmm_widen(GMM_BF16, (uint16_t)(w[i / 2] >> 16 * (i % 2)));
}
GMM__DEVICE uint4 gated_pack(const float f[8]) {
    return make_uint4(gmm_pack2(GMM_BF16, f[0], f[1]), gmm_pack2(GMM_BF16, f[2], f[3]),
                      gmm_pack2(GMM_BF16, f[4], f[5]), gmm_pack2(GMM_BF16, f[6], f[7]));
}

/* Epilogues: `d` is a store slot with `count` rows of D from row `row` of the tile on, from its column `first` on. Rows
   are `wide` bytes apart, and their 16-byte vectors are swizzled by the row. They return whether D is stored, too. */
GMM__DEVICE int gated_forward(const gated_args *args, const gmm_sm90_tile *t, const char *d, const int wide, int row,
                              const int count, int first) {
    const gated_vectors at = gated_vectors_of(args, t, wide / 2, 2, row, first);
    int x, i;
    if (!args->e.data) return 1;
#pragma unroll
    for (x = 0; x < count; x += at.row_step) {
        const int line = at.line + x, live = row + line < at.live;
        const float p = args->prob && live ? args->prob[at.row + row + line] : 1.0f;
        float a[8], b[8], da, db;
        gated_unpack(*(const uint4 *)(d + line * wide + (((2 * at.vec) ^ (line & 7)) << 4)), a);
        gated_unpack(*(const uint4 *)(d + line * wide + (((2 * at.vec + 1) ^ (line & 7)) << 4)), b);
#pragma unroll
        for (i = 0; i < 8; i++) a[i] = p * gmm_act_point(GMM_GATE_SILU, 1, args->coef, a[i], b[i], &da, &db);
        if (live) *gated_address(&args->e, at.row + row + line, at.col) = gated_pack(a);
    }
    return args->p.d.data != NULL;
}
GMM__DEVICE int gated_backward(const gated_args *args, const gmm_sm90_tile *t, const char *d, const int wide, int row,
                               const int count, int first) {
    const gated_vectors at = gated_vectors_of(args, t, wide, 1, row, first);
    uint4 gate[4], linear[4]; /* loaded together, so that all loads are in flight */
    int x, i;
    if (!args->e.data) return 1;
    if (row == 0) /* prefetches the tile's z to the L2, in lines of 128 bytes */
        for (i = gmm_tid_x() & 127; i < t->rows * (wide / 64); i += 128)
            if (i % (wide / 64) * 32 < t->cols - first)
                asm volatile("prefetch.global.L2 [%0];" : : "l"(__cvta_generic_to_global(
                    gated_address(&args->z, at.row + i / (wide / 64), 2 * (t->n0 + first) + i % (wide / 64) * 64))));
#pragma unroll
    for (x = 0; x < count; x += at.row_step) {
        gate[x / at.row_step] = linear[x / at.row_step] = make_uint4(0, 0, 0, 0);
        if (row + at.line + x < at.live) {
            const uint4 *const z = gated_address(&args->z, at.row + row + at.line + x, 2 * at.col);
            gate[x / at.row_step] = z[0];
            linear[x / at.row_step] = z[1];
        }
    }
#pragma unroll
    for (x = 0; x < count; x += at.row_step) {
        const int line = at.line + x;
        const int64_t to = at.row + row + line;
        if (row + line < at.live) {
            const float p = args->prob ? args->prob[to] : 1.0f;
            float a[8], b[8], g[8], f[8];
            gated_unpack(gate[x / at.row_step], a);
            gated_unpack(linear[x / at.row_step], b);
            gated_unpack(*(const uint4 *)(d + line * wide + ((at.vec ^ (line & 7)) << 4)), g);
#pragma unroll
            for (i = 0; i < 8; i++) {
                float da, db;
                f[i] = p * gmm_act_point(GMM_GATE_SILU, 1, args->coef, a[i], b[i], &da, &db);
                a[i] = da * (p * g[i]);
                b[i] = db * (p * g[i]);
            }
            gated_address(&args->e, to, 2 * at.col)[0] = gated_pack(a);
            gated_address(&args->e, to, 2 * at.col)[1] = gated_pack(b);
            if (args->h.data) *gated_address(&args->h, to, at.col) = gated_pack(f);
        }
    }
    return args->p.d.data != NULL;
}

/* Table entries of the two operations: operands as in fwd and dgrad. */
enum { gmm_ta_swiglu = gmm_ta_fwd, gmm_tb_swiglu = gmm_tb_fwd, gmm_ragged_k_swiglu = gmm_ragged_k_fwd };
enum { gmm_ta_dswiglu = gmm_ta_dgrad, gmm_tb_dswiglu = gmm_tb_dgrad, gmm_ragged_k_dswiglu = gmm_ragged_k_dgrad };
#define gmm_wgmma_bf16_swiglu gmm_wgmma_bf16_fwd
#define gmm_wgmma_bf16_dswiglu gmm_wgmma_bf16_dgrad
#define GMM__BODY 9
#define GMM__ARGS gated_args
#define GMM__EPILOGUE gated_forward
#define GMM__ROW (gmm_gemm_swiglu_bf16_160x256x64_sm90, swiglu, bf16, GMM_BF16, 160x256, 1, none)
#include "../../gmm_kernels.cuh"
#define GMM__ROW (gmm_gemm_swiglu_bf16_256x128x64_sm90, swiglu, bf16, GMM_BF16, 256x128, 1, none)
#include "../../gmm_kernels.cuh"
#define GMM__ROW (gmm_gemm_swiglu_bf16_176x128x64_sm90, swiglu, bf16, GMM_BF16, 176x128, 1, none)
#include "../../gmm_kernels.cuh"
#undef GMM__EPILOGUE
#define GMM__EPILOGUE gated_backward
#define GMM__ROW (gmm_gemm_dswiglu_bf16_160x256x64_sm90, dswiglu, bf16, GMM_BF16, 160x256, 1, none)
#include "../../gmm_kernels.cuh"
#define GMM__ROW (gmm_gemm_dswiglu_bf16_256x128x64_sm90, dswiglu, bf16, GMM_BF16, 256x128, 1, none)
#include "../../gmm_kernels.cuh"
#define GMM__ROW (gmm_gemm_dswiglu_bf16_176x128x64_sm90, dswiglu, bf16, GMM_BF16, 176x128, 1, none)
#include "../../gmm_kernels.cuh"
#undef GMM__EPILOGUE

#define TILE(tag) \
    {#tag, GMM__CAT(gmm_sm90_tile_n_, tag), GMM__CAT(gmm_sm90_smem_bytes_, tag), \
     {(const void *)gmm_gemm_swiglu_bf16_##tag##x64_sm90, (const void *)gmm_gemm_dswiglu_bf16_##tag##x64_sm90}}
static const struct {
    const char *name;
    int32_t cols, shared;
    const void *function[2]; /* forward, backward */
} TILES[gated_tiles] = {TILE(160x256), TILE(256x128), TILE(176x128)};

const char *gated_tile(int tile) { return TILES[tile].name; }

static gmm_kmat kmat(const void *data, int64_t ld, int64_t stride) {
    gmm_kmat m = GMM_ZERO;
    m.data = (void *)(uintptr_t)data;
    m.dtype = GMM_BF16;
    m.ld = ld;
    m.stride = stride * 2;
    return m;
}

/* As gmm_launch_sm90 does. */
cudaError_t gated_run(const gated_call *call, cudaStream_t stream) {
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const int32_t ffn = call->ffn, k = call->k, n = call->backward ? ffn : 2 * ffn, cols = TILES[call->tile].cols;
    const void *const function = TILES[call->tile].function[call->backward != 0];
    cudaLaunchConfig_t config = GMM_ZERO;
    cudaLaunchAttribute attributes[2];
    PFN_cuTensorMapEncodeTiled_v12000 map;
    int processors = 0, device = 0;
    gated_args args;
    void *encode = NULL, *params[1] = {&args};
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault,
                                                     &found);
    if (e == cudaSuccess && !encode) e = cudaErrorNotSupported;
    if (e == cudaSuccess) e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (e != cudaSuccess) return e;
    map = (PFN_cuTensorMapEncodeTiled_v12000)encode;
    memset(&args, 0, sizeof args);
    memset(attributes, 0, sizeof attributes);
    args.groups = call->groups;
    args.p.a = kmat(call->x, k, 0);
    args.p.b = kmat(call->w, call->backward ? n : k, (int64_t)n * k);
    args.p.bias = kmat(call->bias, n, n);
    if (!call->bias) args.p.bias.dtype = GMM_NONE;
    args.p.d = kmat(call->d, n, 0);
    args.p.groups = call->groups.count;
    args.p.capacity = call->groups.capacity;
    args.p.m = (int32_t)call->groups.capacity;
    args.p.n = n;
    args.p.k = k;
    args.e = kmat(call->e, call->backward ? 2 * ffn : ffn, 0);
    args.h = kmat(call->h, ffn, 0);
    args.z = kmat(call->z, 2 * ffn, 0);
    args.prob = call->prob;
    args.coef = gmm_act_coefficients(&call->act);
    if (!(call->backward ? gmm_sm90_map_matrix(map, &args.b, &args.p.b, n, k, 64, 1)
                         : gmm_sm90_map_matrix(map, &args.b, &args.p.b, k, n, cols / 2, 1)) ||
        !gmm_sm90_map_tokens(map, &args.a, &args.p.a, k, 64) || !gmm_sm90_map_tokens(map, &args.a16, &args.p.a, k, 16))
        return cudaErrorInvalidValue;
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = 2;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)(processors / 2 * 2));
    config.blockDim = dim3(GMM_SM90_THREADS);
    config.dynamicSmemBytes = (size_t)TILES[call->tile].shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    e = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, TILES[call->tile].shared);
    return e == cudaSuccess ? cudaLaunchKernelExC(&config, function, params) : e;
}
