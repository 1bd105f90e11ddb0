/* device.c - see device.h */
#ifdef HAVE_CUDA
#include "device.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local struct {
    char *base, *image;
    size_t bytes, used;
    cudaStream_t stream, streams[DEVICE_STREAMS];
    cudaEvent_t begin, end;
    void *huge[8];
    int huge_count;
} D;

static const char *text(cudaError_t e) { return e == cudaSuccess ? NULL : cudaGetErrorString(e); }

/* A machine without a driver reports that its driver is too old, and has version 0. */
static cudaError_t count_devices(int *count) {
    int driver = 0;
    cudaError_t e = cudaGetDeviceCount(count);
    if (e != cudaSuccess) *count = 0;
    if (e == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && !driver)
        e = cudaErrorNoDevice;
    (void)cudaGetLastError();
    return e == cudaErrorNoDevice ? cudaSuccess : e;
}
int device_count(void) {
    int count = 0;
    (void)count_devices(&count);
    return count;
}
const char *device_uncounted(void) {
    int count = 0;
    return text(count_devices(&count));
}

gmm_stream device_open(size_t bytes, const char **why) {
    cudaError_t e = cudaSetDevice(0);
    void *base = NULL;
    memset(&D, 0, sizeof D);
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&D.stream, cudaStreamNonBlocking);
    D.streams[0] = D.stream;
    if (e == cudaSuccess) e = cudaMalloc(&base, bytes);
    D.base = (char *)base;
    D.image = (char *)malloc(bytes);
    D.bytes = bytes;
    *why = e != cudaSuccess ? cudaGetErrorString(e) : D.image ? NULL : "no host memory for the arena's image";
    return *why ? NULL : D.stream;
}

void device_close(void) {
    device_reset();
    if (D.begin) (void)cudaEventDestroy(D.begin);
    if (D.end) (void)cudaEventDestroy(D.end);
    (void)cudaFree(D.base);
    for (int i = 0; i < DEVICE_STREAMS; i++)
        if (D.streams[i]) (void)cudaStreamDestroy(D.streams[i]);
    free(D.image);
}

gmm_stream device_use_stream(int i) {
    (void)cudaStreamSynchronize(D.stream);
    if (!D.streams[i] && cudaStreamCreateWithFlags(&D.streams[i], cudaStreamNonBlocking) != cudaSuccess) return NULL;
    return D.stream = D.streams[i];
}

size_t device_memory(size_t *total) {
    size_t available = 0;
    if (cudaMemGetInfo(&available, total) != cudaSuccess) available = *total = 0;
    return available;
}

void *device_alloc(size_t bytes, size_t alignment, int huge) {
    size_t at = (D.used + alignment - 1) / alignment * alignment;
    if (huge) {
        void *p = NULL;
        if (D.huge_count == 8 || cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) return NULL;
        return D.huge[D.huge_count++] = p;
    }
    if (at + bytes > D.bytes) return NULL;
    device_set(D.base + D.used, 0, at - D.used); /* so that device_fetch copies no uninitialised memory */
    D.used = at + bytes;
    return D.base + at;
}

void device_reset(void) {
    device_edges_free();
    while (D.huge_count > 0) (void)cudaFree(D.huge[--D.huge_count]);
    D.used = 0;
}

/* Virtual memory management of the driver. */
static _Thread_local struct {
    CUresult (*granularity)(size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*unreserve)(CUdeviceptr, size_t);
    struct { CUdeviceptr base; size_t page, bytes; CUmemGenericAllocationHandle handle; } edge[16];
    int count;
} V;

static int find(const char *name, void *function) {
    enum cudaDriverEntryPointQueryResult found;
    void *f = NULL;
    const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &found);
    memcpy(function, &f, sizeof f);
    return e == cudaSuccess && found == cudaDriverEntryPointSuccess && f;
}
/* Reserves a page in front of and behind the mapping. */
void *device_edge(size_t bytes, int at_end, const char **why) {
    CUmemAllocationProp prop;
    CUmemAccessDesc access;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr base;
    size_t page, mapped;
    *why = "no functions of virtual memory";
    if (!find("cuMemGetAllocationGranularity", &V.granularity) || !find("cuMemAddressReserve", &V.reserve) ||
        !find("cuMemCreate", &V.create) || !find("cuMemMap", &V.map) || !find("cuMemSetAccess", &V.access) ||
        !find("cuMemUnmap", &V.unmap) || !find("cuMemRelease", &V.release) || !find("cuMemAddressFree", &V.unreserve))
        return NULL;
    *why = "too many, or no memory";
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = access.location.id = 0;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (V.count == 16 || V.granularity(&page, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS) return NULL;
    mapped = (bytes + page - 1) / page * page;
    if (V.reserve(&base, mapped + 2 * page, 0, 0, 0) != CUDA_SUCCESS) return NULL;
    if (V.create(&handle, mapped, &prop, 0) != CUDA_SUCCESS ||
        V.map(base + page, mapped, 0, handle, 0) != CUDA_SUCCESS ||
        V.access(base + page, mapped, &access, 1) != CUDA_SUCCESS)
        return NULL;
    V.edge[V.count].base = base;
    V.edge[V.count].page = page;
    V.edge[V.count].bytes = mapped;
    V.edge[V.count++].handle = handle;
    return (void *)(uintptr_t)(base + page + (at_end ? mapped - bytes : 0));
}
void device_edges_free(void) {
    (void)cudaStreamSynchronize(D.stream);
    while (V.count > 0) {
        V.count--;
        (void)V.unmap(V.edge[V.count].base + V.edge[V.count].page, V.edge[V.count].bytes);
        (void)V.release(V.edge[V.count].handle);
        (void)V.unreserve(V.edge[V.count].base, V.edge[V.count].bytes + 2 * V.edge[V.count].page);
    }
}

void device_put(void *device, const void *host, size_t bytes) {
    if (bytes) (void)cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, D.stream);
}
void device_get(void *host, const void *device, size_t bytes) {
    if (bytes) (void)cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, D.stream);
    (void)cudaStreamSynchronize(D.stream);
}
void device_copy(void *to, const void *from, size_t bytes) {
    if (bytes) (void)cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, D.stream);
}
void device_set(void *device, int byte, size_t bytes) {
    if (bytes) (void)cudaMemsetAsync(device, byte, bytes, D.stream);
}

const char *device_wait(void) {
    cudaError_t e = cudaStreamSynchronize(D.stream);
    if (e == cudaSuccess) e = cudaGetLastError();
    return text(e);
}

void device_fetch(void) { device_get(D.image, D.base, D.used); }
const unsigned char *device_host_bytes(const void *device) {
    return (const unsigned char *)D.image + ((const char *)device - D.base);
}

const char *device_begin_capture(void) {
    return text(cudaStreamBeginCapture(D.stream, cudaStreamCaptureModeThreadLocal));
}
const char *device_end_capture(void **graph) {
    cudaGraph_t g = NULL;
    cudaGraphExec_t run = NULL;
    cudaError_t e = cudaStreamEndCapture(D.stream, &g);
    if (e == cudaSuccess) e = cudaGraphInstantiate(&run, g, 0);
    if (g) (void)cudaGraphDestroy(g);
    if (e != cudaSuccess) (void)cudaGetLastError(); /* is reported here, not by the next wait */
    *graph = run;
    return text(e);
}
const char *device_end_capture_counted(const char *part, int *kernels, int *named) {
    cudaGraph_t g = NULL;
    cudaGraphNode_t nodes[256];
    size_t count = sizeof nodes / sizeof nodes[0], i;
    cudaError_t e = cudaStreamEndCapture(D.stream, &g);
    *kernels = *named = 0;
    if (e == cudaSuccess) e = cudaGraphGetNodes(g, nodes, &count);
    for (i = 0; i < count && e == cudaSuccess; i++) {
        enum cudaGraphNodeType type;
        struct cudaKernelNodeParams params;
        const char *name = "";
        e = cudaGraphNodeGetType(nodes[i], &type);
        if (e != cudaSuccess || type != cudaGraphNodeTypeKernel) continue;
        e = cudaGraphKernelNodeGetParams(nodes[i], &params);
        if (e == cudaSuccess) e = cudaFuncGetName(&name, params.func);
        ++*kernels;
        *named += strstr(name, part) != NULL;
    }
    if (g) (void)cudaGraphDestroy(g);
    return text(e);
}
const char *device_replay(void *graph) { return text(cudaGraphLaunch((cudaGraphExec_t)graph, D.stream)); }
void device_graph_free(void *graph) {
    if (graph) (void)cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

const char *device_clock_start(void) {
    cudaError_t e = D.begin ? cudaSuccess : cudaEventCreate(&D.begin);
    if (e == cudaSuccess && !D.end) e = cudaEventCreate(&D.end);
    return text(e != cudaSuccess ? e : cudaEventRecord(D.begin, D.stream));
}
const char *device_clock_stop(double *seconds) {
    float milliseconds = 0.0f;
    cudaError_t e = cudaEventRecord(D.end, D.stream);
    if (e == cudaSuccess) e = cudaEventSynchronize(D.end);
    if (e == cudaSuccess) e = cudaEventElapsedTime(&milliseconds, D.begin, D.end);
    *seconds = 1e-3 * (double)milliseconds;
    return text(e);
}

static const char stamp_text[] =
    ".version 7.0\n"
    ".target sm_80\n"
    ".address_size 64\n"
    ".visible .entry stamp(.param .u64 to, .param .u64 nanoseconds) {\n"
    "    .reg .pred %again;\n"
    "    .reg .b32 %block, %sm;\n"
    "    .reg .b64 %at, %stay, %begin, %end, %passed, %number;\n"
    "    mov.u64 %begin, %globaltimer;\n"
    "    ld.param.u64 %at, [to];\n"
    "    ld.param.u64 %stay, [nanoseconds];\n"
    "stays:\n"
    "    mov.u64 %end, %globaltimer;\n"
    "    sub.u64 %passed, %end, %begin;\n"
    "    setp.lt.u64 %again, %passed, %stay;\n"
    "    @%again bra stays;\n"
    "    mov.u32 %block, %ctaid.x;\n"
    "    mov.u32 %sm, %smid;\n"
    "    cvt.u64.u32 %number, %sm;\n"
    "    cvta.to.global.u64 %at, %at;\n"
    "    mad.wide.u32 %at, %block, 24, %at;\n"
    "    st.global.u64 [%at], %begin;\n"
    "    st.global.u64 [%at + 8], %end;\n"
    "    st.global.u64 [%at + 16], %number;\n"
    "    ret;\n"
    "}\n";

const char *device_stamps(gmm_stream stream, device_stamp *to, int blocks, int whole, uint64_t nanoseconds) {
    static cudaLibrary_t library;
    static cudaKernel_t kernel;
    void *parameters[2] = {&to, &nanoseconds};
    int most = 0;
    cudaError_t e = cudaSuccess;
    if (!kernel) {
        e = cudaLibraryLoadData(&library, stamp_text, NULL, NULL, 0, NULL, NULL, 0);
        if (e == cudaSuccess) e = cudaLibraryGetKernel(&kernel, library, "stamp");
    }
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    if (e == cudaSuccess)
        e = cudaKernelSetAttributeForDevice(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most, 0);
    if (e == cudaSuccess)
        e = cudaLaunchKernel((const void *)kernel, (dim3){(unsigned)blocks, 1, 1}, (dim3){1, 1, 1}, parameters,
                             whole ? (size_t)most : 0, (cudaStream_t)stream);
    return text(e);
}

static const char late_text[] =
    ".version 7.8\n"
    ".target sm_90\n"
    ".address_size 64\n"
    ".visible .entry late(.param .u64 to, .param .u64 from, .param .u32 words, .param .u64 nanoseconds) {\n"
    "    .reg .pred %again;\n"
    "    .reg .b32 %left, %word;\n"
    "    .reg .b64 %to, %from, %stay, %begin, %passed;\n"
    "    griddepcontrol.launch_dependents;\n"
    "    mov.u64 %begin, %globaltimer;\n"
    "    ld.param.u64 %to, [to];\n"
    "    ld.param.u64 %from, [from];\n"
    "    ld.param.u32 %left, [words];\n"
    "    ld.param.u64 %stay, [nanoseconds];\n"
    "    cvta.to.global.u64 %to, %to;\n"
    "    cvta.to.global.u64 %from, %from;\n"
    "stays:\n"
    "    mov.u64 %passed, %globaltimer;\n"
    "    sub.u64 %passed, %passed, %begin;\n"
    "    setp.lt.u64 %again, %passed, %stay;\n"
    "    @%again bra stays;\n"
    "copies:\n"
    "    ld.global.u32 %word, [%from];\n"
    "    st.global.u32 [%to], %word;\n"
    "    add.u64 %to, %to, 4;\n"
    "    add.u64 %from, %from, 4;\n"
    "    sub.u32 %left, %left, 1;\n"
    "    setp.ne.u32 %again, %left, 0;\n"
    "    @%again bra copies;\n"
    "    ret;\n"
    "}\n";

const char *device_late_copy(void *to, const void *from, int words, uint64_t nanoseconds) {
    static cudaLibrary_t library;
    static cudaKernel_t kernel;
    void *parameters[4] = {&to, &from, &words, &nanoseconds};
    cudaError_t e = cudaSuccess;
    if (!kernel) {
        e = cudaLibraryLoadData(&library, late_text, NULL, NULL, 0, NULL, NULL, 0);
        if (e == cudaSuccess) e = cudaLibraryGetKernel(&kernel, library, "late");
    }
    if (e == cudaSuccess)
        e = cudaLaunchKernel((const void *)kernel, (dim3){1, 1, 1}, (dim3){1, 1, 1}, parameters, 0, D.stream);
    return text(e);
}
extern void emulated_early_reads(void *at, const void *early, size_t bytes) __attribute__((weak));
int device_early_reads(void *at, const void *early, size_t bytes) {
    if (emulated_early_reads) emulated_early_reads(at, early, bytes);
    return emulated_early_reads != NULL;
}
extern int64_t emulated_wgmmas(int n8) __attribute__((weak));
int64_t device_wgmmas(int n8) { return emulated_wgmmas ? emulated_wgmmas(n8) : -1; }
int device_prices(void) {
    int processors = 0;
    (void)cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
    return processors >= 100;
}
int device_emulated(void) {
    cudaLibrary_t library;
    const cudaError_t e = cudaLibraryLoadData(&library, late_text, NULL, NULL, 0, NULL, NULL, 0);
    (void)cudaGetLastError();
    if (e == cudaSuccess) (void)cudaLibraryUnload(library);
    return e == cudaErrorNotSupported;
}
int device_processors(void) {
    int n = 0;
    (void)cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0);
    return n;
}
#else
typedef int device_needs_cuda; /* ISO C requires a declaration in every translation unit */
#endif
