/* probes - measures properties of the hardware that the kernels depend on: one row per question, with the prediction
   for an H200 and the result on this GPU, the median of several turns. Conclusions:
   src/gmm_kernels/KERNELS.md. */
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURNS = 9, STEPS = 512, CHASE = 4096 };
static const size_t BUFFER_BYTES = (size_t)1 << 30;

/* TMA boxes of 64 lines by `width` bytes at consecutive addresses: `rows` lines of a box are inside of the tensor, the
   others out of bounds. */
typedef struct boxes {
    int width, rows, boxes_per_row, count; /* boxes_per_row: boxes side by side */
    const char *whole_memory;           /* first box under a tensor map that spans all of memory; NULL = a ragged map */
} boxes;

static struct {
    char *a, *b;
    int64_t *ticks; /* device [2]: clock cycles of block 0; a sink for unused results */
    cudaStream_t stream;
    cudaEvent_t begin, end;
    cudaGraphExec_t chain;
    int processors, hopper, groups;
    PFN_cuTensorMapEncodeTiled_v12000 encode;
    CUtensorMap map, *stored; /* stored: in device memory */
    boxes boxes;
} P;

static void cuda(cudaError_t e, const char *what) {
    if (e == cudaSuccess) return;
    fprintf(stderr, "probes: %s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}
static int ascending(const void *a, const void *b) {
    const double p = *(const double *)a, q = *(const double *)b;
    return (p > q) - (p < q);
}
static void row(const char *what, const char *predicted, double got, const char *unit) {
    printf("%-66s  %-18s  %8.4g %s\n", what, predicted, got, unit);
    fflush(stdout);
}
static void fetch(int64_t ticks[2]) {
    cuda(cudaGetLastError(), "a launch");
    cuda(cudaMemcpyAsync(ticks, P.ticks, 2 * sizeof *ticks, cudaMemcpyDeviceToHost, P.stream), "ticks");
    cuda(cudaStreamSynchronize(P.stream), "a probe");
}

/* Median seconds per call of `calls` calls between two events. */
static double seconds(void (*run)(void), int calls) {
    double t[TURNS];
    run();
    cuda(cudaGetLastError(), "a launch");
    for (int i = 0; i < TURNS; i++) {
        float ms;
        cuda(cudaEventRecord(P.begin, P.stream), "event");
        for (int c = 0; c < calls; c++) run();
        cuda(cudaEventRecord(P.end, P.stream), "event");
        cuda(cudaEventSynchronize(P.end), "a probe");
        cuda(cudaEventElapsedTime(&ms, P.begin, P.end), "event");
        t[i] = ms * 1e-3 / calls;
    }
    qsort(t, TURNS, sizeof *t, ascending);
    return t[TURNS / 2];
}
/* Median clock cycles of block 0. */
static double clocks(void (*run)(void)) {
    double t[TURNS];
    for (int i = 0; i < TURNS; i++) {
        int64_t ticks[2];
        run();
        fetch(ticks);
        t[i] = (double)ticks[0];
    }
    qsort(t, TURNS, sizeof *t, ascending);
    return t[TURNS / 2];
}

/* ---------------------------------------------------------------------------------------------------- Memory --- */

/* A block copies 16 KiB: 256 threads with 4 loads of 16 bytes in flight each. */
static __global__ void copy_blocks(const uint4 *from, uint4 *to) {
    const int64_t first = (int64_t)blockIdx.x * 1024 + threadIdx.x;
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = from[first + 256 * i];
#pragma unroll
    for (int i = 0; i < 4; i++) to[first + 256 * i] = v[i];
}
static __global__ void read_blocks(const uint4 *from, int64_t *unwanted) {
    const int64_t first = (int64_t)blockIdx.x * 1024 + threadIdx.x;
    uint32_t x = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 v = __ldcs(from + first + 256 * i);
        x ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (x == 0x9E3779B9u) unwanted[1] = x; /* keeps the compiler from removing the loads */
}
static __global__ void write_blocks(uint4 *to) {
    const int64_t first = (int64_t)blockIdx.x * 1024 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; i++) __stcs(to + first + 256 * i, make_uint4(1, 2, 3, blockIdx.x));
}
/* Reads once and writes eight times, as a permute with top-8 routing does. */
static __global__ void spread_blocks(const uint4 *from, uint4 *to, int64_t apart) {
    const int64_t first = (int64_t)blockIdx.x * 1024 + threadIdx.x;
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = from[first + 256 * i];
    for (int k = 0; k < 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) __stcs(to + k * apart + first + 256 * i, v[i]);
}
/* Accumulation in memory: read, added to and written by blocks of 128 threads with `loads` loads of 16 bytes in flight
   each. */
template <int loads> static __global__ __launch_bounds__(128) void add_blocks(float4 *sums, int64_t count, float by) {
    for (int64_t at = (int64_t)blockIdx.x * 128 * loads + threadIdx.x; at < count;
         at += (int64_t)gridDim.x * 128 * loads) {
        float4 v[loads];
#pragma unroll
        for (int i = 0; i < loads; i++) v[i] = sums[at + 128 * i];
        /* all loads are issued before the first store; otherwise ptxas would reorder them to save registers */
        __syncthreads();
#pragma unroll
        for (int i = 0; i < loads; i++)
            sums[at + 128 * i] = make_float4(v[i].x + by, v[i].y + by, v[i].z + by, v[i].w + by);
    }
}
template <int loads> static void run_add_blocks(void) {
    add_blocks<loads><<<(unsigned)P.processors * 2, 128, 0, P.stream>>>((float4 *)P.b, (int64_t)(BUFFER_BYTES / 16),
                                                                         1.0f);
}
enum { UNIT = 16384 };
static void run_copy(void) {
    copy_blocks<<<(unsigned)(BUFFER_BYTES / UNIT), 256, 0, P.stream>>>((const uint4 *)P.a, (uint4 *)P.b);
}
static void run_memcpy(void) {
    cuda(cudaMemcpyAsync(P.b, P.a, BUFFER_BYTES, cudaMemcpyDeviceToDevice, P.stream), "copy");
}
static void run_read(void) {
    read_blocks<<<(unsigned)(BUFFER_BYTES / UNIT), 256, 0, P.stream>>>((const uint4 *)P.a, P.ticks);
}
static void run_write(void) { write_blocks<<<(unsigned)(BUFFER_BYTES / UNIT), 256, 0, P.stream>>>((uint4 *)P.b); }
static void run_spread(void) {
    spread_blocks<<<(unsigned)(BUFFER_BYTES / 8 / UNIT), 256, 0, P.stream>>>((const uint4 *)P.a, (uint4 *)P.b,
                                                                   (int64_t)(BUFFER_BYTES / 8 / 16));
}

/* Pointer chasing: the address of each load is the result of the previous one. */
static __global__ void chase_links(char *links, int64_t *ticks) {
    int64_t begin = clock64(), at = 0;
    for (int i = 0; i < CHASE; i++) at = __ldcg((const long long *)(links + at));
    ticks[0] = clock64() - begin;
    ticks[1] = at;
}
/* Links each element to the next one or, with advance 0, to itself. */
static __global__ void make_links(char *links, int64_t step, int64_t bytes, int advance) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < bytes / step; i += gridDim.x * blockDim.x)
        *(int64_t *)(links + i * step) = (i + advance) * step % bytes;
}
static void run_chase(void) { chase_links<<<1, 1, 0, P.stream>>>(P.a, P.ticks); }
static void run_cold_chase(void) { /* evicts the links from the L2 */
    run_write();
    run_chase();
}

/* L2 latency by SM and address: one thread per SM loads one line repeatedly, then the next line. took [SM][line], clock
   cycles per load. */
enum { LATENCY_LINES = 512, LATENCY_LOADS = 16, LATENCY_STRIDE = (1 << 21) - 4096 + 128 };
static __global__ void map_l2_latency(const char *links, float *took) {
    for (int place = 0; place < LATENCY_LINES; place++) {
        const int64_t here = (int64_t)place * LATENCY_STRIDE;
        int64_t at = here, begin;
        for (int i = 0; i < 2; i++) at = __ldcg((const long long *)(links + at)); /* brings the line into the L2 */
        if (at != here) return; /* orders the clock reads after the loads */
        begin = clock64();
        for (int i = 0; i < LATENCY_LOADS; i++) at = __ldcg((const long long *)(links + at));
        if (at != here) return;
        took[blockIdx.x * LATENCY_LINES + place] = (float)(clock64() - begin) / LATENCY_LOADS;
    }
}
static void l2_latency_rows(void) {
    const int all = P.processors * LATENCY_LINES;
    float *took = (float *)malloc(sizeof *took * (size_t)all);
    double *sorted = (double *)malloc(sizeof *sorted * (size_t)all), spread[LATENCY_LINES];
    if (!took || !sorted) exit(1);
    make_links<<<256, 256, 0, P.stream>>>(P.a, LATENCY_STRIDE, (int64_t)LATENCY_STRIDE * LATENCY_LINES, 0);
    map_l2_latency<<<(unsigned)P.processors, 1, 0, P.stream>>>(P.a, (float *)P.b);
    cuda(cudaMemcpyAsync(took, P.b, sizeof *took * (size_t)all, cudaMemcpyDeviceToHost, P.stream), "places");
    cuda(cudaStreamSynchronize(P.stream), "places");
    for (int i = 0; i < all; i++) sorted[i] = took[i];
    qsort(sorted, (size_t)all, sizeof *sorted, ascending);
    for (int place = 0; place < LATENCY_LINES; place++) {
        float least = took[place], most = least;
        for (int i = place; i < all; i += LATENCY_LINES) {
            if (took[i] < least) least = took[i];
            if (took[i] > most) most = took[i];
        }
        spread[place] = most - least;
    }
    qsort(spread, LATENCY_LINES, sizeof *spread, ascending);
    row("such loads, by every multiprocessor from 512 places: the least", "200 clocks", sorted[0], "clocks");
    row("  a tenth take less", "215 clocks", sorted[all / 10], "clocks");
    row("  the median", "265 clocks", sorted[all / 2], "clocks");
    row("  a tenth take more", "320 clocks", sorted[all - 1 - all / 10], "clocks");
    row("  the most", "400 clocks", sorted[all - 1], "clocks");
    row("  of one place, the slowest less the fastest one, the median", "130 clocks",
        spread[LATENCY_LINES / 2], "clocks");
    free(took);
    free(sorted);
}

/* -------------------------------------------------------------------------------------------------- Launches --- */

static __global__ void nothing(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
static void launch_nothing(unsigned blocks, int early) {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute;
    memset(&attribute, 0, sizeof attribute);
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(128);
    config.stream = P.stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    cuda(cudaLaunchKernelExC(&config, (const void *)nothing, NULL), "a launch");
}
/* Launches in a graph, so that the host does not limit the rate. */
enum { LINKS = 400 };
static cudaGraphExec_t chain_of(int early) {
    cudaGraph_t graph;
    cudaGraphExec_t run;
    cuda(cudaStreamBeginCapture(P.stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < LINKS; i++) launch_nothing(1, early);
    cuda(cudaStreamEndCapture(P.stream, &graph), "capture");
    cuda(cudaGraphInstantiate(&run, graph, 0), "graph");
    cuda(cudaGraphDestroy(graph), "graph");
    return run;
}
static void run_chain(void) { cuda(cudaGraphLaunch(P.chain, P.stream), "graph"); }
static void run_many(void) { launch_nothing((unsigned)P.processors * 1024, 0); }

/* ------------------------------------------------------------------------------------------------- Products --- */

/* mma.sync on registers only: eight independent accumulators per warp. */
static __global__ void mma_rate(int64_t *ticks) {
    float d[8][4], sum = 0.0f;
    int64_t begin;
    memset(d, 0, sizeof d);
    __syncthreads();
    begin = clock64();
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, "
                         "{%0,%1,%2,%3};" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]) : "r"(s));
    __syncthreads();
    if (threadIdx.x == 0) ticks[0] = clock64() - begin;
    for (int i = 0; i < 32; i++) sum += d[i / 4][i % 4]; /* keeps the compiler from removing the products */
    if (sum == 42.0f) ticks[1] = 1;
}
static void run_mma(void) { mma_rate<<<(unsigned)P.processors, 256, 0, P.stream>>>(P.ticks); }

/* wgmma on zeros, both operands in shared memory: two warp groups, each with an A of its own, and one B. */
enum { WGMMA_SHARED = 49152 };
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
    "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)
#define T32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31"
#define T64 T32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
    "%56,%57,%58,%59,%60,%61,%62,%63"
#define T128 T64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86," \
    "%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110," \
    "%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(n, text, a, b, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" text "}, " a ", " b ", 1, 1, 1, 0, 0;" \
                 : __VA_ARGS__ : "l"(left), "l"(right))
/* Inlined with a constant n, so that one of the three instructions remains. */
static __device__ __forceinline__ void wgmma_loop(int n, int64_t *ticks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    const uint64_t lines = (uint64_t)1 << 62 | (uint64_t)64 << 32 | (uint64_t)1 << 16; /* 128-byte swizzle */
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    float d[128];
    int64_t begin;
    for (int i = threadIdx.x; i < WGMMA_SHARED / 4; i += 256) ((uint32_t *)shared)[i] = 0;
    memset(d, 0, sizeof d);
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
    __syncthreads();
    begin = clock64();
    for (int s = 0; s < STEPS / 4; s++) {
        asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint64_t left = lines | (at + 8192 * (threadIdx.x / 128) + 32 * k) >> 4;
            const uint64_t right = lines | (at + 16384 + 32 * k) >> 4;
            if (n == 64) WGMMA("64", T32, "%32", "%33", D32(0));
            else if (n == 128) WGMMA("128", T64, "%64", "%65", D32(0), D32(32));
            else WGMMA("256", T128, "%128", "%129", D32(0), D32(32), D32(64), D32(96));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) ticks[0] = clock64() - begin;
    if (d[0] + d[n / 2 - 1] == 42.0f) ticks[1] = 1;
#else
    (void)n, (void)ticks;
#endif
}
static __global__ __launch_bounds__(256) void wgmma_rate_64(int64_t *ticks) { wgmma_loop(64, ticks); }
static __global__ __launch_bounds__(256) void wgmma_rate_128(int64_t *ticks) { wgmma_loop(128, ticks); }
static __global__ __launch_bounds__(256) void wgmma_rate_256(int64_t *ticks) { wgmma_loop(256, ticks); }
static void run_wgmma_64(void) {
    wgmma_rate_64<<<(unsigned)P.processors, 256, WGMMA_SHARED, P.stream>>>(P.ticks);
}
static void run_wgmma_128(void) {
    wgmma_rate_128<<<(unsigned)P.processors, 256, WGMMA_SHARED, P.stream>>>(P.ticks);
}
static void run_wgmma_256(void) {
    wgmma_rate_256<<<(unsigned)P.processors, 256, WGMMA_SHARED, P.stream>>>(P.ticks);
}

/* ---------------------------------------------------------------------------------- Sums added by the memory --- */

/* TMA reduce-adds blocks of 16 KiB of fp32 to memory. */
static __global__ void add_bulk(char *to, int64_t bytes) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char shared[];
    const uint32_t from = (uint32_t)__cvta_generic_to_shared(shared);
    /* the smallest subnormal number */
    for (int i = threadIdx.x; i < UNIT / 4; i += blockDim.x) ((uint32_t *)shared)[i] = 1;
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int64_t at = (int64_t)blockIdx.x * UNIT; at < bytes; at += (int64_t)gridDim.x * UNIT) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     : : "l"(to + at), "r"(from), "r"((int)UNIT) : "memory");
        asm volatile("cp.async.bulk.commit_group;" : : : "memory");
        asm volatile("cp.async.bulk.wait_group.read 3;" : : : "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
#else
    (void)to, (void)bytes;
#endif
}
static void run_add(void) {
    add_bulk<<<(unsigned)P.processors * 4, 128, UNIT, P.stream>>>(P.b, (int64_t)BUFFER_BYTES);
}

static const struct { const char *what, *predicted; void (*run)(void); } ADDS[] = {
    {"1 GiB of fp32 sums read, added to, written: 2 loads under way", "2.7 TB/s", run_add_blocks<2>},
    {"  4 loads", "3.4 TB/s", run_add_blocks<4>},
    {"  8 loads", "3.9 TB/s", run_add_blocks<8>},
    {"  16 loads", "4.1 TB/s", run_add_blocks<16>}};

/* ------------------------------------------------------------------------------------- Barriers, boxes by TMA --- */

/* For other architectures than Hopper these are empty, and the kernels that call them are never launched. */
static __device__ __forceinline__ uint32_t shared_at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
static __device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
#endif
}
/* Makes mbarriers, and shared memory that threads have written, visible to the async proxy (TMA, wgmma); __syncthreads
   follows. */
static __device__ __forceinline__ void fence_shared(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
#endif
}
static __device__ __forceinline__ void mbarrier_expect_tx(uint32_t bar, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
#endif
}
[[maybe_unused]] static __device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
#endif
}
static __device__ __forceinline__ int mbarrier_test_wait(uint32_t bar, uint32_t parity) {
    uint32_t done = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
#endif
    return (int)done;
}
/* Waits for a phase; after two seconds it traps, which ends the program. */
static __device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
    if (mbarrier_test_wait(bar, parity)) return;
    for (const int64_t begin = clock64(); !mbarrier_test_wait(bar, parity);)
        if (clock64() - begin > (int64_t)1 << 32) __trap();
}
static __device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, uint32_t bar, int4 at) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];" : : "r"(to), "l"(map), "r"(bar), "r"(at.x), "r"(at.y),
                 "r"(at.z), "r"(at.w) : "memory");
#endif
}
static __device__ __forceinline__ void tma_store(const CUtensorMap *map, uint32_t from, int4 at) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 : : "l"(map), "r"(from), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w) : "memory");
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
#endif
}
/* Waits until at most `left` stores still read shared memory or, with -1, until all have been written. */
template <int left> static __device__ __forceinline__ void tma_wait(void) {
#if __CUDA_ARCH__ >= 900
    if (left < 0) asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
    else asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(left < 0 ? 0 : left) : "memory");
#endif
}

/* Tensor maps of 16-bit elements with boxes of 64 lines. Ragged: dimensions {features, 2^30, ends, wraps}, strides {s,
   s, 2^34 - s}: coordinates {x, 2^30 - rows + r, end, 2^30} address row end - rows + r, and are out of bounds from r =
   rows on. Whole memory: {features, 64, 2^14, 2^31 - 1}, strides {s, 16, 2^18}, from address 256 on. */
enum { LINES = 64, OUTSIDE = 1 << 30, LOWEST = 256, PITCH = 8192 };
static CUtensorMap make_map(void *base, int64_t pitch, cuuint64_t features, int width, int swizzled,
                            cuuint64_t rows, cuuint64_t third, cuuint64_t fourth, cuuint64_t s2, cuuint64_t s3) {
    const cuuint64_t dims[4] = {features, rows, third, fourth}, strides[3] = {(cuuint64_t)pitch, s2, s3};
    const cuuint32_t box[4] = {(cuuint32_t)width / 2, LINES, 1, 1}, one[4] = {1, 1, 1, 1};
    CUtensorMap map;
    if (P.encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, base, dims, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        cuda(cudaErrorInvalidValue, "a tensor map");
    return map;
}
static CUtensorMap ragged_map(void *base, int64_t pitch, int64_t features, int width, int swizzled) {
    return make_map(base, pitch, (cuuint64_t)features, width, swizzled, OUTSIDE, 0x7FFF0000, 0x7FFF0000,
                    (cuuint64_t)pitch, ((cuuint64_t)1 << 34) - (cuuint64_t)pitch);
}
static void open_maps(void) {
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *encode = NULL;
    cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found), "maps");
    if (found != cudaDriverEntryPointSuccess || !encode) cuda(cudaErrorNotSupported, "cuTensorMapEncodeTiled");
    P.encode = (PFN_cuTensorMapEncodeTiled_v12000)encode;
}

/* Coordinates of box `i`; boxes side by side are consecutive. */
static __device__ __forceinline__ int4 box_at(const boxes *b, int i) {
    const int line = i >> (__ffs(b->boxes_per_row) - 1), x = (i & (b->boxes_per_row - 1)) * (b->width / 2);
    if (b->whole_memory) {
        const uint64_t from = (uint64_t)(uintptr_t)b->whole_memory + (uint64_t)line * LINES * PITCH - LOWEST;
        return make_int4(x, 0, (int)(from >> 4 & 0x3FFF), (int)(from >> 18));
    }
    return make_int4(x, OUTSIDE - b->rows, (line + 1) * b->rows, OUTSIDE);
}
/* One lane of each warp keeps `BOX_STAGES` boxes in flight. The data is not read. */
enum { BOX_WARPS = 4, BOX_STAGES = 3, BOX_BYTES = 16384 };
enum { BOX_SHARED = BOX_WARPS * BOX_STAGES * (BOX_BYTES + 8) };
static __global__ void load_boxes(const __grid_constant__ CUtensorMap map, const boxes b) {
    extern __shared__ __align__(1024) char shared[];
    const int warp = threadIdx.x / 32;
    const uint32_t box_smem = shared_at(shared) + BOX_STAGES * BOX_BYTES * warp;
    const uint32_t bars = shared_at(shared) + BOX_WARPS * BOX_STAGES * BOX_BYTES + 8 * BOX_STAGES * warp;
    int turn = 0;
    if (threadIdx.x % 32) return;
    for (int s = 0; s < BOX_STAGES; s++) mbarrier_init(bars + 8 * s, 1);
    fence_shared();
    for (int i = blockIdx.x * BOX_WARPS + warp; i < b.count; i += gridDim.x * BOX_WARPS, turn++) {
        const uint32_t s = turn % BOX_STAGES, bar = bars + 8 * s;
        if (turn >= BOX_STAGES) mbarrier_wait(bar, (turn / BOX_STAGES & 1) ^ 1);
        mbarrier_expect_tx(bar, LINES * b.width); /* bytes out of bounds count too: TMA fills them with zeros */
        tma_load(box_smem + s * BOX_BYTES, &map, bar, box_at(&b, i));
    }
    for (int i = turn < BOX_STAGES ? 0 : turn - BOX_STAGES; i < turn; i++)
        mbarrier_wait(bars + 8 * (i % BOX_STAGES), i / BOX_STAGES & 1);
}
static __global__ void store_boxes(const __grid_constant__ CUtensorMap map, const boxes b) {
    extern __shared__ __align__(1024) char shared[];
    for (int i = threadIdx.x; i < BOX_BYTES / 4; i += blockDim.x) ((uint32_t *)shared)[i] = i;
    fence_shared();
    __syncthreads();
    if (threadIdx.x % 32) return;
    for (int i = blockIdx.x * BOX_WARPS + threadIdx.x / 32; i < b.count; i += gridDim.x * BOX_WARPS) {
        tma_store(&map, shared_at(shared), box_at(&b, i));
        tma_wait<7>();
    }
    tma_wait<-1>();
}
static void run_load_boxes(void) {
    load_boxes<<<(unsigned)P.processors, 32 * BOX_WARPS, BOX_SHARED, P.stream>>>(P.map, P.boxes);
}
static void run_store_boxes(void) {
    store_boxes<<<(unsigned)P.processors, 32 * BOX_WARPS, BOX_BYTES, P.stream>>>(P.map, P.boxes);
}

/* One block for every number of rows from 0 to 64: loads a box and compares it, then stores a box whose lines are all
   filled. A matrix has 192 rows of 128 elements for each block; boxes begin at row 64, element 64. */
enum { TAILS = 65, TAIL_ROWS = 192, TAIL_COLS = 128, EMPTY = 0xFFFF };
static __device__ __forceinline__ uint16_t tail_value(int row, int col) {
    return (uint16_t)((row * TAIL_COLS + col) % 65521 + 1); /* not 0, and not EMPTY */
}
static __global__ void fill_tails(uint16_t *to) {
    to[blockIdx.x * TAIL_COLS + threadIdx.x] = tail_value((int)blockIdx.x, (int)threadIdx.x);
}
static __global__ void move_tails(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                                  int64_t *right) {
    __shared__ __align__(1024) uint16_t box_smem[LINES * 64];
    __shared__ __align__(8) uint64_t bars[1];
    const int rows = (int)blockIdx.x, first = TAIL_ROWS * rows + 64;
    const int4 at = make_int4(64, OUTSIDE - rows, first + rows, OUTSIDE);
    const uint32_t bar = shared_at(bars);
    for (int i = threadIdx.x; i < LINES * 64; i += blockDim.x) box_smem[i] = EMPTY;
    if (threadIdx.x == 0) mbarrier_init(bar, 1);
    fence_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_expect_tx(bar, sizeof box_smem);
        tma_load(shared_at(box_smem), &from, bar, at);
    }
    mbarrier_wait(bar, 0);
    for (int i = threadIdx.x; i < LINES * 64; i += blockDim.x) {
        const int r = i / 64, c = i % 64;
        uint16_t *const e = &box_smem[r * 64 + (((c / 8) ^ (r % 8)) * 8) + c % 8];
        if (*e == (r < rows ? tail_value(first + r, 64 + c) : 0)) atomicAdd((unsigned long long *)&right[0], 1ull);
        *e = tail_value(first + r, 64 + c);
    }
    fence_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store(&to, shared_at(box_smem), at);
        tma_wait<-1>();
    }
}
static __global__ void compare_tails(const uint16_t *stored, int64_t *right) {
    const int row = (int)blockIdx.x, col = (int)threadIdx.x, r = row % TAIL_ROWS - 64;
    const int inside = col >= 64 && r >= 0 && r < row / TAIL_ROWS;
    if (stored[row * TAIL_COLS + col] == (inside ? tail_value(row, col) : EMPTY))
        atomicAdd((unsigned long long *)&right[1], 1ull);
}
static void tail_rows(void) {
    const int loaded = TAILS * LINES * 64, stored = TAILS * TAIL_ROWS * TAIL_COLS;
    int64_t right[2];
    fill_tails<<<TAILS * TAIL_ROWS, TAIL_COLS, 0, P.stream>>>((uint16_t *)P.a);
    cuda(cudaMemsetAsync(P.b, 0xFF, (size_t)stored * 2, P.stream), "memset");
    cuda(cudaMemsetAsync(P.ticks, 0, sizeof right, P.stream), "memset");
    move_tails<<<TAILS, 128, 0, P.stream>>>(ragged_map(P.a, TAIL_COLS * 2, TAIL_COLS, 128, 1),
                                            ragged_map(P.b, TAIL_COLS * 2, TAIL_COLS, 128, 1), P.ticks);
    compare_tails<<<TAILS * TAIL_ROWS, TAIL_COLS, 0, P.stream>>>((const uint16_t *)P.b, P.ticks);
    fetch(right);
    row("boxes of 0 to 64 rows loaded: wrong elements, zeros outside", "0", (double)(loaded - right[0]), "");
    row("  stored: wrong elements, in the box and around it", "0", (double)(stored - right[1]), "");
}

static void box_rows(void) {
    static const struct { int width, rows; const char *loaded, *stored; } BOXES[] = {
        {256, 64, "4.4 TB/s", "4.2 TB/s"}, {128, 64, "4.4 TB/s", "3.6 TB/s"}, {64, 64, "4.2 TB/s", "2.8 TB/s"},
        {128, 63, "4.4 TB/s", "3.6 TB/s"}, {128, 33, "4.4 TB/s", "3.6 TB/s"}, {128, 32, "4.4 TB/s", "3.6 TB/s"},
        {128, 16, "4.3 TB/s", "3.4 TB/s"}, {128, 8, "3.4 TB/s", "2.8 TB/s"},  {128, 1, "0.45 TB/s", "0.6 TB/s"}};
    const int lines = (int)(BUFFER_BYTES / PITCH);
    char what[80];
    tail_rows();
    cuda(cudaFuncSetAttribute((const void *)load_boxes, cudaFuncAttributeMaxDynamicSharedMemorySize, BOX_SHARED),
         "shared memory");
    for (size_t i = 0; i < sizeof BOXES / sizeof *BOXES; i++) {
        const int width = BOXES[i].width, rows = BOXES[i].rows, swizzled = width == 128;
        const double bytes = 1e-12 * (double)(lines / rows * rows) * PITCH;
        P.boxes = {width, rows, PITCH / width, lines / rows * (PITCH / width), NULL};
        P.map = ragged_map(P.a, PITCH, PITCH / 2, width, swizzled);
        snprintf(what, sizeof what, "1 GiB loaded by ragged boxes of %d bytes, %d of 64 rows inside", width, rows);
        row(what, BOXES[i].loaded, bytes / seconds(run_load_boxes, 2), "TB/s");
        P.map = ragged_map(P.b, PITCH, PITCH / 2, width, swizzled);
        row("  stored", BOXES[i].stored, bytes / seconds(run_store_boxes, 2), "TB/s");
    }
    P.boxes = {128, LINES, PITCH / 128, lines / LINES * (PITCH / 128), P.a};
    P.map = make_map((void *)(uintptr_t)LOWEST, PITCH, PITCH / 2, 128, 1, LINES, 1 << 14, 0x7FFFFFFF, 16, 1 << 18);
    row("1 GiB loaded by boxes of a map over all of memory", "4.4 TB/s",
        1e-12 * (double)BUFFER_BYTES / seconds(run_load_boxes, 2), "TB/s");
}

/* ------------------------------------------------------------------------------------------- Gathered rows --- */

/* Stages of 160 rows of 128 bytes, the rows in random order, as a product with gathered rows reads them: 64 stages of
   each 160 rows. One way is a TMA box per row, which lands swizzled without a fence; the other copies of 16 bytes by
   cp.async, eight lanes to a row. The rows are in the L2. Each word of memory has its own index, and block 0 counts the
   chunks of 16 bytes of its last stage that lie where a swizzle of 128 bytes has them. */
enum { GATHERED = 160, GATHER_STAGES = 8, GATHER_BYTES = GATHERED * 128, GATHER_ROWS = 2048, GATHER_STEPS = 512 };
enum { GATHER_SHARED = GATHER_STAGES * (GATHER_BYTES + 8) };
static __device__ __forceinline__ int gathered_row(int step, int line) {
    uint32_t v = (uint32_t)(blockIdx.x * 4096 + step / 64 * GATHERED + line) * 2654435761u;
    v = (v ^ v >> 15) * 2246822519u;
    return (int)((v ^ v >> 13) % GATHER_ROWS);
}
static __device__ __forceinline__ void tma_load_row(uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int row) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];" : : "r"(to), "l"(map), "r"(bar), "r"(x), "r"(row) : "memory");
#endif
}
static __device__ __forceinline__ void copy_chunks(uint32_t to, const char *from, uint32_t bar, int step) {
#if __CUDA_ARCH__ >= 900
    const int chunk = (int)threadIdx.x % 8;
    for (int i = (int)threadIdx.x / 8; i < GATHERED; i += (int)blockDim.x / 8)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     : : "r"(to + 128 * i + 16 * (chunk ^ i % 8)),
                     "l"(from + (int64_t)gathered_row(step, i) * PITCH + step % 64 * 128 + 16 * chunk) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(bar) : "memory");
#endif
}
static __global__ void fill_gathered(uint32_t *to) {
    const uint32_t i = blockIdx.x * 256 + threadIdx.x;
    to[i] = i;
}
template <int by_tma>
static __global__ void gather_rows(const __grid_constant__ CUtensorMap map, const char *from, int64_t *ticks) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t stages = shared_at(shared), bars = stages + GATHER_STAGES * GATHER_BYTES;
    int64_t begin, right = 0;
    if (threadIdx.x < GATHER_STAGES) mbarrier_init(bars + 8 * threadIdx.x, by_tma ? 1 : blockDim.x);
    fence_shared();
    __syncthreads();
    begin = clock64();
    for (int step = 0; step < GATHER_STEPS + GATHER_STAGES; step++) {
        const uint32_t s = step % GATHER_STAGES, bar = bars + 8 * s, to = stages + GATHER_BYTES * s;
        if (step >= GATHER_STAGES) mbarrier_wait(bar, (step / GATHER_STAGES & 1) ^ 1);
        if (step >= GATHER_STEPS) continue; /* waits for the last ones */
        if (by_tma) {
            if (threadIdx.x == 0) mbarrier_expect_tx(bar, GATHER_BYTES);
            for (int i = (int)threadIdx.x; i < GATHERED; i += (int)blockDim.x)
                tma_load_row(to + 128 * i, &map, bar, step % 64 * 64, gathered_row(step, i));
        } else {
            copy_chunks(to, from, bar, step);
        }
    }
    if (blockIdx.x || threadIdx.x) return;
    ticks[0] = clock64() - begin;
    for (int i = 0; i < 8 * GATHERED; i++) {
        const int step = GATHER_STEPS - 1, line = i / 8, chunk = i % 8;
        const char *const at = shared + step % GATHER_STAGES * GATHER_BYTES + 128 * line + 16 * (chunk ^ line % 8);
        right += *(const int *)at == gathered_row(step, line) * (PITCH / 4) + step % 64 * 32 + 4 * chunk;
    }
    ticks[1] = right;
}
static unsigned gather_blocks, gather_threads;
template <int by_tma> static void run_gather(void) {
    gather_rows<by_tma><<<gather_blocks, gather_threads, GATHER_SHARED, P.stream>>>(P.map, P.a, P.ticks);
}
static void gathered_rows(void) {
    static const struct { int by_tma; unsigned threads; const char *what, *alone, *all; } METHODS[] = {
        {1, 32, "160 gathered rows of 128 bytes, a TMA box each, one warp", "320 to 1300 clocks", "700 to 1300 clocks"},
        {1, 128, "  four warps", "320 to 1300 clocks", "700 to 1300 clocks"},
        {0, 64, "  by cp.async, two warps", "640 clocks", "900 clocks"},
        {0, 128, "  by cp.async, four warps", "640 clocks", "800 clocks"}};
    const cuuint64_t dims[2] = {PITCH / 2, GATHER_ROWS}, strides[1] = {PITCH};
    const cuuint32_t box[2] = {64, 1}, one[2] = {1, 1};
    int64_t right[2];
    fill_gathered<<<GATHER_ROWS * (PITCH / 1024), 256, 0, P.stream>>>((uint32_t *)P.a);
    if (P.encode(&P.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, P.a, dims, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) !=
        CUDA_SUCCESS)
        cuda(cudaErrorInvalidValue, "a tensor map");
    cuda(cudaFuncSetAttribute((const void *)gather_rows<0>, cudaFuncAttributeMaxDynamicSharedMemorySize, GATHER_SHARED),
         "shared memory");
    cuda(cudaFuncSetAttribute((const void *)gather_rows<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, GATHER_SHARED),
         "shared memory");
    for (size_t i = 0; i < sizeof METHODS / sizeof *METHODS; i++) {
        void (*const run)(void) = METHODS[i].by_tma ? run_gather<1> : run_gather<0>;
        gather_threads = METHODS[i].threads;
        gather_blocks = 1;
        row(METHODS[i].what, METHODS[i].alone, clocks(run) / GATHER_STEPS, "clocks");
        gather_blocks = (unsigned)P.processors;
        row("    on all multiprocessors", METHODS[i].all, clocks(run) / GATHER_STEPS, "clocks");
        run();
        fetch(right);
        row("    chunks of 16 bytes in their places", "1280", (double)right[1], "");
    }
}

/* ------------------------------------------------------------------------------- Maps that change on the way --- */

/* A warp loads boxes of 8 KiB, which are in the L2, one after another: by a tensor map that is a kernel parameter or in
   device memory, with an acquire fence before each box, or by a map whose address field it replaces each time, in
   device memory or in a copy in shared memory. ticks: clock cycles of all boxes; the number of boxes with the right
   data. */
enum { READY, IN_MEMORY, ACQUIRED, REPLACED, REPLACED_SHARED, WAYS };
enum { SWITCHES = 64, BOX = LINES * 128 };
template <int way> static __global__ void switch_maps(const __grid_constant__ CUtensorMap given, CUtensorMap *map,
                                                      char *from, int64_t *ticks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ACQUIRE asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" : : "l"(map) : "memory")
    __shared__ __align__(1024) char box_smem[BOX];
    __shared__ __align__(128) CUtensorMap copy;
    __shared__ __align__(8) uint64_t bars[1];
    const uint32_t bar = shared_at(bars);
    const int lane = (int)threadIdx.x;
    int64_t took = 0, right = 0;
    ((uint32_t *)&copy)[lane] = ((const uint32_t *)map)[lane];
    if (lane == 0) mbarrier_init(bar, 1);
    fence_shared();
    __syncwarp();
    if (way != READY) ACQUIRE;
    for (int i = 0; i < SWITCHES; i++) {
        const int64_t begin = clock64();
        char *const box = from + (int64_t)i * BOX;
        if (way == REPLACED && lane == 0) {
            asm volatile("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;" : : "l"(map), "l"(box)
                         : "memory");
            asm volatile("fence.proxy.tensormap::generic.release.gpu;" : : : "memory");
        }
        if (way == REPLACED_SHARED) {
            if (lane == 0)
                asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                             : : "r"(shared_at(&copy)), "l"(box) : "memory");
            __syncwarp();
            asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
                         "[%0], [%1], 128;" : : "l"(map), "r"(shared_at(&copy)) : "memory");
        }
        if (way >= ACQUIRED) ACQUIRE;
        if (lane == 0) {
            mbarrier_expect_tx(bar, BOX);
            if (way == READY) tma_load(shared_at(box_smem), &given, bar, make_int4(0, LINES * i, 0, 0));
            else tma_load(shared_at(box_smem), map, bar, make_int4(0, way < REPLACED ? LINES * i : 0, 0, 0));
        }
        mbarrier_wait(bar, i & 1);
        took += clock64() - begin;
        right += *(volatile int *)box_smem == i * BOX; /* a box begins with a link to itself */
        __syncwarp();
    }
    if (lane == 0) ticks[0] = took, ticks[1] = right;
#undef ACQUIRE
#endif
}
template <int way> static void run_switch(void) {
    switch_maps<way><<<1, 32, 0, P.stream>>>(P.map, P.stored, P.a, P.ticks);
}
static void switch_rows(void) {
    static const struct { const char *what, *predicted; void (*run)(void); } ROWS[WAYS] = {
        {"a box of 8 KiB by TMA from the L2, the map a parameter", "750 clocks", run_switch<READY>},
        {"  the map in device memory", "750 clocks", run_switch<IN_MEMORY>},
        {"  an acquire of the map before each box", "1250 clocks", run_switch<ACQUIRED>},
        {"  its address replaced in device memory before each box", "2300 clocks", run_switch<REPLACED>},
        {"  replaced in shared memory, copied to device memory", "2000 clocks", run_switch<REPLACED_SHARED>}};
    int64_t ticks[2], wrong = WAYS * SWITCHES;
    make_links<<<256, 256, 0, P.stream>>>(P.a, BOX, (int64_t)SWITCHES * BOX, 0);
    P.map = make_map(P.a, 128, 64, 128, 1, SWITCHES * LINES, 1, 1, 16, 16);
    cuda(cudaMalloc(&P.stored, sizeof P.map), "memory");
    for (int i = 0; i < WAYS; i++) {
        cuda(cudaMemcpyAsync(P.stored, &P.map, sizeof P.map, cudaMemcpyHostToDevice, P.stream), "a map");
        row(ROWS[i].what, ROWS[i].predicted, clocks(ROWS[i].run) / SWITCHES, "clocks");
        fetch(ticks);
        wrong -= ticks[1];
    }
    row("  boxes of these that came from elsewhere, or not", "0", (double)wrong, "");
}

/* ------------------------------------------------------------------------------------ Promoted sums of FP8 --- */

/* Warp groups multiply 64 x 128 of E4M3 zeros in shared memory, K = 128, and add the product times scales of its rows
   to their accumulators; with FAST the tensor cores accumulate. The scales: two constants; or two per thread and
   product, loaded from memory one product ahead, or written to shared memory by a warp beside the consumers. */
enum { FAST, CONSTANT, FROM_MEMORY, FROM_SHARED, KINDS };
enum { DEEP = 256, GROUPS = 3, SCALE_ROWS = 64 * GROUPS, SLOTS = 4 };
enum { FP8_B = GROUPS * 8192, FP8_SCALES = FP8_B + 16384, FP8_BARS = FP8_SCALES + SLOTS * SCALE_ROWS * 4,
       FP8_SHARED = FP8_BARS + SLOTS * 16, FP8_SCALES_OF_BLOCK = (DEEP + 1) * SCALE_ROWS };
#define WGMMA_FP8(left, right, more) \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" T64 "}, %64, %65, p, 1, 1;\n}" \
                 : D32(0), D32(32) : "l"(left), "l"(right), "r"((int)(more)))
template <int kind> static __global__ __launch_bounds__(128 * GROUPS + 128, 1)
void promote(const float *scales, int64_t *ticks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    const uint32_t at = shared_at(shared), bars = at + FP8_BARS; /* of a slot: full, empty */
    const int group = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0), groups = (int)blockDim.x / 128 - 1;
    const int lane = (int)threadIdx.x % 32;
    int64_t begin;
    for (int i = threadIdx.x; i < FP8_SCALES / 4; i += blockDim.x) ((uint32_t *)shared)[i] = 0;
    if (threadIdx.x == 0)
        for (int s = 0; s < SLOTS; s++) {
            mbarrier_init(bars + 16 * s, 1);
            mbarrier_init(bars + 16 * s + 8, 4 * groups); /* arrivals of all consumer warps */
        }
    fence_shared();
    __syncthreads();
    scales += blockIdx.x * FP8_SCALES_OF_BLOCK;
    begin = clock64();
    if (group < groups) {
        const uint64_t lines = (uint64_t)1 << 62 | (uint64_t)64 << 32 | (uint64_t)1 << 16;
        const int line = threadIdx.x / 32 * 16 + lane / 4;
        float d[64], sum[64], total = 0.0f, low = __ldg(scales + line), high = __ldg(scales + line + 8);
        asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
        memset(d, 0, sizeof d);
        memset(sum, 0, sizeof sum);
        for (int s = 0; s < DEEP; s++) {
            const int slot = s % SLOTS;
            float low_next = low, high_next = high;
            if (kind == FROM_MEMORY) {
                low_next = __ldg(scales + (s + 1) * SCALE_ROWS + line);
                high_next = __ldg(scales + (s + 1) * SCALE_ROWS + line + 8);
                asm volatile("" : : : "memory");
            }
            if (kind == FROM_SHARED) mbarrier_wait(bars + 16 * slot, s / SLOTS & 1);
#pragma unroll
            for (int i = 0; i < 64; i++) asm volatile("" : "+f"(d[i]) : : "memory");
            asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
#pragma unroll
            for (int k = 0; k < 4; k++)
                WGMMA_FP8(lines | (at + 8192 * group + 32 * k) >> 4, lines | (at + FP8_B + 32 * k) >> 4,
                          kind == FAST || k > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
            if (kind == FROM_SHARED) {
                const uint32_t from = at + FP8_SCALES + 4 * (slot * SCALE_ROWS + line);
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(low) : "r"(from) : "memory");
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(high) : "r"(from + 32) : "memory");
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");
#pragma unroll
            for (int i = 0; i < 64; i++) {
                asm volatile("" : "+f"(d[i]) : : "memory");
                if (kind != FAST) sum[i] = fmaf(d[i], i % 4 < 2 ? low : high, sum[i]);
            }
            if (kind == FROM_MEMORY) low = low_next, high = high_next;
            if (kind == FROM_SHARED) __syncwarp();
            if (kind == FROM_SHARED && lane == 0) mbarrier_arrive(bars + 16 * slot + 8);
        }
        for (int i = 0; i < 64; i++) total += sum[i] + d[i]; /* keeps the compiler from removing the products */
        if (total == 42.0f) ticks[1] = 1;
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        for (int s = 0; s < DEEP && kind == FROM_SHARED && threadIdx.x % 128 < 32; s++) {
            const int slot = s % SLOTS;
            float *const put = (float *)(shared + FP8_SCALES) + slot * SCALE_ROWS + lane;
            float v[SCALE_ROWS / 32];
#pragma unroll
            for (int i = 0; i < SCALE_ROWS / 32; i++) v[i] = __ldg(scales + s * SCALE_ROWS + lane + 32 * i);
            mbarrier_wait(bars + 16 * slot + 8, (s / SLOTS & 1) ^ 1);
#pragma unroll
            for (int i = 0; i < SCALE_ROWS / 32; i++) put[32 * i] = v[i];
            __syncwarp();
            if (lane == 0) mbarrier_arrive(bars + 16 * slot);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) ticks[0] = clock64() - begin;
#endif
}
template <int kind> static void run_promote(void) {
    promote<kind><<<(unsigned)P.processors, 128 * P.groups + 128, FP8_SHARED, P.stream>>>((const float *)P.a, P.ticks);
}
static void fp8_rows(void) {
    static void (*const RUN[KINDS])(void) = {run_promote<FAST>, run_promote<CONSTANT>, run_promote<FROM_MEMORY>,
                                             run_promote<FROM_SHARED>};
    static const struct { const char *what, *predicted[2]; } ROWS[KINDS] = {
        {"not promoted", {"0.99", "0.99"}},
        {"promoted, the rows' scales stay in registers", {"0.78", "0.99"}},
        {"promoted, asked of memory 128 deep ahead", {"0.70", "0.89"}},
        {"promoted, by way of shared memory", {"0.75", "0.97"}}};
    char what[80];
    cuda(cudaMemsetAsync(P.a, 0, (size_t)P.processors * FP8_SCALES_OF_BLOCK * 4, P.stream), "memset");
    for (P.groups = 2; P.groups <= GROUPS; P.groups++)
        for (int i = 0; i < KINDS; i++) {
            snprintf(what, sizeof what, "fp8, %d x 64 x 128 %s", P.groups, ROWS[i].what);
            row(what, ROWS[i].predicted[P.groups - 2], DEEP * 4.0 * 64.0 * P.groups / clocks(RUN[i]),
                "of the tensor cores' clocks");
        }
}

/* ------------------------------------------------------------------------------------------------------ Main --- */

int main(void) {
    cudaDeviceProp prop;
    uint32_t bits = 0;
    cuda(cudaGetDeviceProperties(&prop, 0), "properties");
    cuda(cudaStreamCreateWithFlags(&P.stream, cudaStreamNonBlocking), "stream");
    cuda(cudaEventCreate(&P.begin), "event");
    cuda(cudaEventCreate(&P.end), "event");
    cuda(cudaMalloc(&P.a, BUFFER_BYTES), "memory");
    cuda(cudaMalloc(&P.b, BUFFER_BYTES), "memory");
    cuda(cudaMalloc(&P.ticks, 2 * sizeof *P.ticks), "memory");
    cuda(cudaMemset(P.a, 0, BUFFER_BYTES), "memset");
    cuda(cudaMemset(P.b, 0, BUFFER_BYTES), "memset");
    cuda(cudaDeviceSynchronize(), "memset");
    P.processors = prop.multiProcessorCount;
    P.hopper = prop.major == 9;
    printf("# %s, %d multiprocessors\n%-66s  %-18s  %s\n", prop.name, P.processors, "probe", "predicted (H200)",
           "here");
    row("copy of 1 GiB by cudaMemcpyAsync", "4.2 TB/s", 2e-12 * (double)BUFFER_BYTES / seconds(run_memcpy, 8), "TB/s");
    row("copy of 1 GiB, blocks of 16 KiB in the order of addresses", "4.1 TB/s",
        2e-12 * (double)BUFFER_BYTES / seconds(run_copy, 8), "TB/s");
    row("read of 1 GiB", "4.6 TB/s", 1e-12 * (double)BUFFER_BYTES / seconds(run_read, 8), "TB/s");
    row("write of 1 GiB", "4.0 TB/s", 1e-12 * (double)BUFFER_BYTES / seconds(run_write, 8), "TB/s");
    row("128 MiB read, written to eight places", "4.0 TB/s",
        1.125e-12 * (double)BUFFER_BYTES / seconds(run_spread, 8), "TB/s");
    for (size_t i = 0; i < sizeof ADDS / sizeof *ADDS; i++)
        row(ADDS[i].what, ADDS[i].predicted, 2e-12 * (double)BUFFER_BYTES / seconds(ADDS[i].run, 4), "TB/s");
    make_links<<<256, 256, 0, P.stream>>>(P.a, 4224, (int64_t)4224 << 10, 1);
    row("a load that the L2 holds, after the one before it", "270 clocks", clocks(run_chase) / CHASE, "clocks");
    make_links<<<256, 256, 0, P.stream>>>(P.a, 131200, (int64_t)131200 << 13, 1);
    row("a load from memory, after the one before it", "800 clocks", clocks(run_cold_chase) / CHASE, "clocks");
    l2_latency_rows();
    cuda(cudaMemsetAsync(P.a, 0, BUFFER_BYTES, P.stream), "memset");
    P.chain = chain_of(0);
    row("an empty kernel behind another, in a graph", "1.5 us", 1e6 * seconds(run_chain, 4) / LINKS, "us");
    P.chain = chain_of(1);
    row("the same, launched early", "0.8 us", 1e6 * seconds(run_chain, 4) / LINKS, "us");
    row("an empty block of 128 threads", "0.6 ns", 1e9 * seconds(run_many, 20) / (1024.0 * P.processors), "ns");
    row("mma.sync m16n8k16 bf16, of a multiprocessor", "1.6 clocks", clocks(run_mma) / (STEPS * 8.0 * 8.0), "clocks");
    if (P.hopper) {
        row("wgmma m64n64k16, of a multiprocessor, operands in shared memory", "32 clocks",
            clocks(run_wgmma_64) / (STEPS * 2.0), "clocks");
        row("wgmma m64n128k16", "64 clocks", clocks(run_wgmma_128) / (STEPS * 2.0), "clocks");
        row("wgmma m64n256k16", "128 clocks", clocks(run_wgmma_256) / (STEPS * 2.0), "clocks");
        cuda(cudaMemset(P.b, 0, BUFFER_BYTES), "memset");
        run_add();
        run_add();
        cuda(cudaMemcpyAsync(&bits, P.b + BUFFER_BYTES - 4, 4, cudaMemcpyDeviceToHost, P.stream), "copy");
        cuda(cudaStreamSynchronize(P.stream), "adding");
        row("the least fp32 number added twice to 0 by TMA, in such numbers", "2", (double)bits, "");
        row("fp32 sums that TMA adds to memory", "1.3 TB/s", 1e-12 * (double)BUFFER_BYTES / seconds(run_add, 4),
            "TB/s");
        fp8_rows();
        open_maps();
        box_rows();
        gathered_rows();
        switch_rows();
    }
    cuda(cudaDeviceSynchronize(), "the end");
    return 0;
}
