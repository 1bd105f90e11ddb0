/* probes - what the hardware under the kernels does: one row per question, with what it was predicted to be on an H200
   and what this GPU gives. Each is the median of several turns. What follows from the answers: NOTES.md. */
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURNS = 9, STEPS = 512, CHASE = 4096 };
static const size_t ROOM = (size_t)1 << 30;

static struct {
    char *a, *b;
    int64_t *ticks; /* device [2]: clocks of block 0; a place for results nobody wants */
    cudaStream_t stream;
    cudaEvent_t begin, end;
    cudaGraphExec_t chain;
    int processors, hopper;
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

/* Median seconds of `calls` calls that one event pair encloses. */
static double seconds(void (*run)(void), int calls) {
    double t[TURNS];
    run();
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
/* Median clocks that block 0 counted. */
static double clocks(void (*run)(void)) {
    double t[TURNS];
    for (int i = 0; i < TURNS; i++) {
        int64_t ticks;
        run();
        cuda(cudaMemcpyAsync(&ticks, P.ticks, sizeof ticks, cudaMemcpyDeviceToHost, P.stream), "clocks");
        cuda(cudaStreamSynchronize(P.stream), "a probe");
        t[i] = (double)ticks;
    }
    qsort(t, TURNS, sizeof *t, ascending);
    return t[TURNS / 2];
}

/* ---------------------------------------------------------------------------------------------------- Memory --- */

/* A block moves 16 KiB: 256 threads, 4 loads of 16 bytes under way per thread. */
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
    if (x == 0x9E3779B9u) unwanted[1] = x; /* so that the loads are needed */
}
static __global__ void write_blocks(uint4 *to) {
    const int64_t first = (int64_t)blockIdx.x * 1024 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; i++) __stcs(to + first + 256 * i, make_uint4(1, 2, 3, blockIdx.x));
}
/* Reads once and writes eight times, as a permute to eight experts does. */
static __global__ void spread_blocks(const uint4 *from, uint4 *to, int64_t apart) {
    const int64_t first = (int64_t)blockIdx.x * 1024 + threadIdx.x;
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = from[first + 256 * i];
    for (int k = 0; k < 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) __stcs(to + k * apart + first + 256 * i, v[i]);
}
enum { UNIT = 16384 };
static void run_copy(void) {
    copy_blocks<<<(unsigned)(ROOM / UNIT), 256, 0, P.stream>>>((const uint4 *)P.a, (uint4 *)P.b);
}
static void run_memcpy(void) {
    cuda(cudaMemcpyAsync(P.b, P.a, ROOM, cudaMemcpyDeviceToDevice, P.stream), "copy");
}
static void run_read(void) {
    read_blocks<<<(unsigned)(ROOM / UNIT), 256, 0, P.stream>>>((const uint4 *)P.a, P.ticks);
}
static void run_write(void) { write_blocks<<<(unsigned)(ROOM / UNIT), 256, 0, P.stream>>>((uint4 *)P.b); }
static void run_spread(void) {
    spread_blocks<<<(unsigned)(ROOM / 8 / UNIT), 256, 0, P.stream>>>((const uint4 *)P.a, (uint4 *)P.b,
                                                                   (int64_t)(ROOM / 8 / 16));
}

/* A chain of loads, each at the address that the one before it gave. */
static __global__ void chase_links(char *links, int64_t *ticks) {
    int64_t begin = clock64(), at = 0;
    for (int i = 0; i < CHASE; i++) at = __ldcg((const long long *)(links + at));
    ticks[0] = clock64() - begin;
    ticks[1] = at;
}
static __global__ void make_links(char *links, int64_t step, int64_t bytes) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < bytes / step; i += gridDim.x * blockDim.x)
        *(int64_t *)(links + i * step) = (i + 1) * step % bytes;
}
static void run_chase(void) { chase_links<<<1, 1, 0, P.stream>>>(P.a, P.ticks); }
static void run_cold_chase(void) { /* what the L2 held has gone */
    run_write();
    run_chase();
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
/* Launches in a graph, so that the host is not what takes the time. */
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

/* mma.sync on registers alone: eight chains per warp. */
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
    for (int i = 0; i < 32; i++) sum += d[i / 4][i % 4]; /* so that none of it is left out */
    if (sum == 42.0f) ticks[1] = 1;
}
static void run_mma(void) { mma_rate<<<(unsigned)P.processors, 256, 0, P.stream>>>(P.ticks); }

/* wgmma on zeros in shared memory, both operands there, two groups of threads with one A each and one B. */
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
/* Inlined with a constant n, so that one of the three instructions is left. */
static __device__ __forceinline__ void wgmma_loop(int n, int64_t *ticks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    const uint64_t lines = (uint64_t)1 << 62 | (uint64_t)64 << 32 | (uint64_t)1 << 16; /* of 128 bytes, swizzled */
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

/* TMA adds 16 KiB of fp32 after another to memory. */
static __global__ void add_bulk(char *to, int64_t bytes) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char shared[];
    const uint32_t from = (uint32_t)__cvta_generic_to_shared(shared);
    for (int i = threadIdx.x; i < UNIT / 4; i += blockDim.x) ((uint32_t *)shared)[i] = 1; /* the least subnormal */
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
    add_bulk<<<(unsigned)P.processors * 4, 128, UNIT, P.stream>>>(P.b, (int64_t)ROOM);
}

/* ------------------------------------------------------------------------------------------------------ Main --- */

int main(void) {
    cudaDeviceProp prop;
    uint32_t bits = 0;
    cuda(cudaGetDeviceProperties(&prop, 0), "properties");
    cuda(cudaStreamCreateWithFlags(&P.stream, cudaStreamNonBlocking), "stream");
    cuda(cudaEventCreate(&P.begin), "event");
    cuda(cudaEventCreate(&P.end), "event");
    cuda(cudaMalloc(&P.a, ROOM), "memory");
    cuda(cudaMalloc(&P.b, ROOM), "memory");
    cuda(cudaMalloc(&P.ticks, 2 * sizeof *P.ticks), "memory");
    cuda(cudaMemset(P.a, 0, ROOM), "memset");
    cuda(cudaMemset(P.b, 0, ROOM), "memset");
    cuda(cudaDeviceSynchronize(), "memset");
    P.processors = prop.multiProcessorCount;
    P.hopper = prop.major == 9;
    printf("# %s, %d multiprocessors\n%-66s  %-18s  %s\n", prop.name, P.processors, "probe", "predicted (H200)",
           "here");
    row("copy of 1 GiB by cudaMemcpyAsync", "4.2 TB/s", 2e-12 * (double)ROOM / seconds(run_memcpy, 8), "TB/s");
    row("copy of 1 GiB, blocks of 16 KiB in the order of addresses", "4.1 TB/s",
        2e-12 * (double)ROOM / seconds(run_copy, 8), "TB/s");
    row("read of 1 GiB", "4.6 TB/s", 1e-12 * (double)ROOM / seconds(run_read, 8), "TB/s");
    row("write of 1 GiB", "4.0 TB/s", 1e-12 * (double)ROOM / seconds(run_write, 8), "TB/s");
    row("128 MiB read, written to eight places", "4.0 TB/s",
        1.125e-12 * (double)ROOM / seconds(run_spread, 8), "TB/s");
    make_links<<<256, 256, 0, P.stream>>>(P.a, 4224, (int64_t)4224 << 10);
    row("a load that the L2 holds, after the one before it", "270 clocks", clocks(run_chase) / CHASE, "clocks");
    make_links<<<256, 256, 0, P.stream>>>(P.a, 131200, (int64_t)131200 << 13);
    row("a load from memory, after the one before it", "800 clocks", clocks(run_cold_chase) / CHASE, "clocks");
    cuda(cudaMemsetAsync(P.a, 0, ROOM, P.stream), "memset");
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
        cuda(cudaMemset(P.b, 0, ROOM), "memset");
        run_add();
        run_add();
        cuda(cudaMemcpyAsync(&bits, P.b + ROOM - 4, 4, cudaMemcpyDeviceToHost, P.stream), "copy");
        cuda(cudaStreamSynchronize(P.stream), "adding");
        row("the least fp32 number added twice to 0 by TMA, in such numbers", "2", (double)bits, "");
        row("fp32 sums that TMA adds to memory", "1.3 TB/s", 1e-12 * (double)ROOM / seconds(run_add, 4), "TB/s");
    }
    cuda(cudaDeviceSynchronize(), "the end");
    return 0;
}
