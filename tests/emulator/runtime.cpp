/* runtime.cpp - the functions of the CUDA runtime that gmm and its tests call, over emulator.cpp. Device memory is host
   memory; each call on a stream takes effect before it returns, or is recorded where the stream is being captured.
   Captured streams form one list in the order of their calls. One launch runs at a time. */
#include "emulator.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <set>
#include <vector>

enum { PARAMETER_BYTES = 8192 }; /* no structure of parameters is larger */

/* One call on a stream. */
typedef struct operation {
    enum { LAUNCH, COPY, FILL } kind;
    const void *kernel;
    emulated_launch_state launch;
    std::vector<unsigned char> args;
    char *dst;
    const char *src;
    size_t dst_pitch, src_pitch, width, height;
    int value;
} operation;

struct CUgraph_st { std::vector<operation> nodes; };
struct CUgraphExec_st { std::vector<operation> nodes; };
struct CUstream_st { CUgraph_st *graph; };  /* the capture that the stream belongs to, or NULL */
struct CUevent_st { CUgraph_st *graph; double seconds; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUstream_st default_stream;
static std::map<char *, size_t> allocations;
static std::set<CUstream_st *> streams;
static std::set<CUevent_st *> events;
static __thread cudaError_t last_error;

static cudaError_t result(cudaError_t e) {
    if (e != cudaSuccess) last_error = e;
    return e;
}
static CUstream_st *stream_of(cudaStream_t stream) { return stream ? stream : &default_stream; }

static void perform(const operation *o) {
    size_t row;
    if (o->kind == operation::LAUNCH) {
        emulated_run(o->kernel, o->args.data(), &o->launch);
        return;
    }
    for (row = 0; row < o->height; row++) {
        if (o->kind == operation::COPY) memmove(o->dst + row * o->dst_pitch, o->src + row * o->src_pitch, o->width);
        else memset(o->dst + row * o->dst_pitch, o->value, o->width);
    }
}
static cudaError_t enqueue(const operation *o, cudaStream_t stream) {
    CUstream_st *s = stream_of(stream);
    pthread_mutex_lock(&lock);
    if (s->graph) s->graph->nodes.push_back(*o);
    else perform(o);
    pthread_mutex_unlock(&lock);
    return result(cudaSuccess);
}

/* --- launches --- */

/* Copies the structure of a kernel's parameters, whose size nobody tells: as many bytes as the largest one has, without
   reading pages that do not exist. */
static void copy_parameters(std::vector<unsigned char> *to, const void *from) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)from;
    uintptr_t end = begin / page * page + page;
    unsigned char resident;
    while (end - begin < PARAMETER_BYTES && mincore((void *)end, page, &resident) == 0) end += page;
    to->assign((const unsigned char *)from, (const unsigned char *)from + (end - begin));
    to->resize(PARAMETER_BYTES);
}
static cudaError_t launch(const void *kernel, dim3 grid, dim3 block, unsigned cluster, int programmatic, void **params,
                          size_t shared, cudaStream_t stream) {
    CUstream_st *s = stream_of(stream);
    operation o = {};
    if (!grid.x || !block.x || block.x > 1024 || grid.x % cluster || cluster > EMULATED_CLUSTER)
        return result(cudaErrorInvalidConfiguration);
    if (shared > EMULATED_SHARED_BYTES) return result(cudaErrorInvalidValue);
    o.kind = operation::LAUNCH;
    o.kernel = kernel;
    o.launch.grid = grid;
    o.launch.block = block;
    o.launch.cluster = cluster;
    o.launch.shared_bytes = shared;
    o.launch.programmatic = programmatic;
    pthread_mutex_lock(&lock);
    if (s->graph) {
        copy_parameters(&o.args, params[0]);
        s->graph->nodes.push_back(o);
    } else emulated_run(kernel, params[0], &o.launch);
    pthread_mutex_unlock(&lock);
    return result(cudaSuccess);
}
cudaError_t cudaLaunchKernel(const void *func, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch(func, grid, block, 1, 0, args, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *func, void **args) {
    unsigned cluster = 1, i;
    int programmatic = 0;
    for (i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
        else if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            programmatic = config->attrs[i].val.programmaticStreamSerializationAllowed;
    return launch(func, config->gridDim, config->blockDim, cluster, programmatic, args, config->dynamicSmemBytes,
                  config->stream);
}
/* Kernels without sm_90a code have other launch bounds than this, by which the library tells them apart. */
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *func) {
    (void)func;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 384;
    return result(cudaSuccess);
}
cudaError_t cudaFuncSetAttribute(const void *func, cudaFuncAttribute attribute, int value) {
    (void)func;
    (void)attribute;
    return result(value <= EMULATED_SHARED_BYTES ? cudaSuccess : cudaErrorInvalidValue);
}

/* --- memory --- */

/* Each allocation ends at a page that cannot be touched, up to the alignment of 256 bytes. */
cudaError_t cudaMalloc(void **out, size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), used = (bytes + 255) / 256 * 256;
    const size_t mapped = (used + page - 1) / page * page + page;
    char *base = (char *)mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || bytes > (size_t)1 << 40) return result(cudaErrorMemoryAllocation);
    (void)mprotect(base + mapped - page, page, PROT_NONE);
    *out = base + mapped - page - used;
    pthread_mutex_lock(&lock);
    allocations[(char *)*out] = mapped;
    pthread_mutex_unlock(&lock);
    return result(cudaSuccess);
}
cudaError_t cudaFree(void *memory) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    std::map<char *, size_t>::iterator i;
    if (!memory) return result(cudaSuccess);
    pthread_mutex_lock(&lock);
    i = allocations.find((char *)memory);
    if (i != allocations.end()) {
        (void)munmap((void *)((uintptr_t)memory / page * page), i->second);
        allocations.erase(i);
    }
    pthread_mutex_unlock(&lock);
    return result(cudaSuccess);
}
cudaError_t cudaMallocHost(void **out, size_t bytes) {
    *out = malloc(bytes ? bytes : 1);
    return result(*out ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void *memory) {
    free(memory);
    return result(cudaSuccess);
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = *total = (size_t)sysconf(_SC_AVPHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    return result(cudaSuccess);
}

static cudaError_t copy(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                        cudaStream_t stream) {
    operation o = {};
    o.kind = operation::COPY;
    o.dst = (char *)dst;
    o.src = (const char *)src;
    o.dst_pitch = dst_pitch;
    o.src_pitch = src_pitch;
    o.width = width;
    o.height = height;
    return enqueue(&o, stream);
}
static cudaError_t fill(void *dst, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
    operation o = {};
    o.kind = operation::FILL;
    o.dst = (char *)dst;
    o.dst_pitch = pitch;
    o.value = value;
    o.width = width;
    o.height = height;
    return enqueue(&o, stream);
}
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return copy(dst, bytes, src, bytes, bytes, 1, stream);
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind) {
    return copy(dst, bytes, src, bytes, bytes, 1, NULL);
}
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
    return copy(dst, dst_pitch, src, src_pitch, width, height, stream);
}
cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream) {
    return fill(dst, bytes, value, bytes, 1, stream);
}
cudaError_t cudaMemset(void *dst, int value, size_t bytes) { return fill(dst, bytes, value, bytes, 1, NULL); }
cudaError_t cudaMemset2DAsync(void *dst, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
    return fill(dst, pitch, value, width, height, stream);
}

/* --- streams and events --- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned, int) {
    *out = new CUstream_st();
    pthread_mutex_lock(&lock);
    streams.insert(*out);
    pthread_mutex_unlock(&lock);
    return result(cudaSuccess);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    streams.erase(stream);
    pthread_mutex_unlock(&lock);
    delete stream;
    return result(cudaSuccess);
}
static cudaError_t unless_capturing(cudaStream_t stream) {
    return result(stream_of(stream)->graph ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return unless_capturing(stream); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return unless_capturing(stream); }
cudaError_t cudaDeviceSynchronize(void) { return result(cudaSuccess); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return result(cudaSuccess);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned) {
    *out = new CUevent_st();
    pthread_mutex_lock(&lock);
    events.insert(*out);
    pthread_mutex_unlock(&lock);
    return result(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    pthread_mutex_lock(&lock);
    events.erase(event);
    pthread_mutex_unlock(&lock);
    delete event;
    return result(cudaSuccess);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    event->graph = flags == cudaEventRecordExternal ? NULL : stream_of(stream)->graph;
    event->seconds = now();
    return result(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}
cudaError_t cudaEventQuery(cudaEvent_t) { return result(cudaSuccess); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return result(cudaSuccess); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    *milliseconds = (float)(1e3 * (end->seconds - begin->seconds));
    return result(cudaSuccess);
}
/* A stream that waits for an event of a capture joins the capture. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (event->graph) stream_of(stream)->graph = event->graph;
    return result(cudaSuccess);
}

/* --- graphs --- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    stream->graph = new CUgraph_st();
    return result(cudaSuccess);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = stream->graph;
    if (!*graph) return result(cudaErrorIllegalState);
    pthread_mutex_lock(&lock);
    for (CUstream_st *s : streams)
        if (s->graph == *graph) s->graph = NULL;
    for (CUevent_st *e : events)
        if (e->graph == *graph) e->graph = NULL;
    pthread_mutex_unlock(&lock);
    return result(cudaSuccess);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    *status = stream_of(stream)->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return result(cudaSuccess);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long) {
    *out = new CUgraphExec_st();
    (*out)->nodes = graph->nodes;
    return result(cudaSuccess);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    size_t i;
    pthread_mutex_lock(&lock);
    for (i = 0; i < graph->nodes.size(); i++) perform(&graph->nodes[i]);
    pthread_mutex_unlock(&lock);
    return result(cudaSuccess);
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return result(cudaSuccess); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return result(cudaSuccess);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    delete graph;
    return result(cudaSuccess);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    size_t i;
    for (i = 0; i < graph->nodes.size() && i < *count; i++) nodes[i] = (cudaGraphNode_t)(void *)&graph->nodes[i];
    *count = i;
    return result(cudaSuccess);
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType *type) {
    const operation *o = (const operation *)(void *)node;
    *type = o->kind == operation::LAUNCH ? cudaGraphNodeTypeKernel
            : o->kind == operation::COPY ? cudaGraphNodeTypeMemcpy : cudaGraphNodeTypeMemset;
    return result(cudaSuccess);
}
cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, cudaKernelNodeParams *params) {
    *params = cudaKernelNodeParams();
    params->func = (void *)(uintptr_t)((const operation *)(void *)node)->kernel;
    return result(cudaSuccess);
}
cudaError_t cudaFuncGetName(const char **name, const void *func) {
    *name = emulated_kernel_name(func);
    return result(cudaSuccess);
}

/* --- the device --- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return result(cudaSuccess);
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return result(cudaSuccess);
}
cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return result(cudaSuccess);
}
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
/* GMM_EMULATOR_PROCESSORS is meant for tests of plans: a launch then runs as many CTAs, which takes long. */
static int processors(void) {
    const char *text = getenv("GMM_EMULATOR_PROCESSORS");
    const int count = text ? atoi(text) : 0;
    return count > 0 ? count : EMULATED_PROCESSORS;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (device) return result(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = processors(); break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = EMULATED_SHARED_BYTES; break;
    default: return result(cudaErrorInvalidValue);
    }
    return result(cudaSuccess);
}
cudaError_t cudaGetLastError(void) {
    const cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess ? "no error" : e == cudaErrorNotSupported ? "operation not supported"
                                                                      : "an error of the emulator";
}

/* Virtual memory: a reservation cannot be touched where nothing is mapped. */
static CUresult memory_granularity(size_t *bytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    *bytes = (size_t)sysconf(_SC_PAGESIZE);
    return CUDA_SUCCESS;
}
static CUresult memory_reserve(CUdeviceptr *out, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *out = (CUdeviceptr)(uintptr_t)p;
    return p == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
static CUresult memory_create(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *,
                              unsigned long long) {
    *out = bytes;
    return CUDA_SUCCESS;
}
static CUresult memory_map(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    return mprotect((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
static CUresult memory_access(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return CUDA_SUCCESS; }
static CUresult memory_unmap(CUdeviceptr at, size_t bytes) {
    return mprotect((void *)(uintptr_t)at, bytes, PROT_NONE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
static CUresult memory_release(CUmemGenericAllocationHandle) { return CUDA_SUCCESS; }
static CUresult memory_free(CUdeviceptr at, size_t bytes) {
    return munmap((void *)(uintptr_t)at, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    static const struct { const char *name; void *function; } known[] = {
        { "cuTensorMapEncodeTiled", (void *)(uintptr_t)emulated_tensor_map },
        { "cuMemGetAllocationGranularity", (void *)(uintptr_t)memory_granularity },
        { "cuMemAddressReserve", (void *)(uintptr_t)memory_reserve },
        { "cuMemCreate", (void *)(uintptr_t)memory_create },
        { "cuMemMap", (void *)(uintptr_t)memory_map },
        { "cuMemSetAccess", (void *)(uintptr_t)memory_access },
        { "cuMemUnmap", (void *)(uintptr_t)memory_unmap },
        { "cuMemRelease", (void *)(uintptr_t)memory_release },
        { "cuMemAddressFree", (void *)(uintptr_t)memory_free }
    };
    *function = NULL;
    for (const auto &row : known)
        if (!strcmp(symbol, row.name)) *function = row.function;
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return result(cudaSuccess);
}

/* --- what only several GPUs need, or code that is no kernel of the library --- */

#define UNSUPPORTED(name, ...) \
    cudaError_t name(__VA_ARGS__) { return result(cudaErrorNotSupported); }
UNSUPPORTED(cudaDeviceEnablePeerAccess, int, unsigned)
UNSUPPORTED(cudaIpcGetMemHandle, cudaIpcMemHandle_t *, void *)
UNSUPPORTED(cudaIpcOpenMemHandle, void **, cudaIpcMemHandle_t, unsigned)
UNSUPPORTED(cudaIpcCloseMemHandle, void *)
UNSUPPORTED(cudaLibraryLoadData, cudaLibrary_t *, const void *, cudaJitOption *, void **, unsigned, cudaLibraryOption *,
            void **, unsigned)
UNSUPPORTED(cudaLibraryUnload, cudaLibrary_t)
UNSUPPORTED(cudaLibraryGetKernel, cudaKernel_t *, cudaLibrary_t, const char *)
UNSUPPORTED(cudaKernelSetAttributeForDevice, cudaKernel_t, cudaFuncAttribute, int, int)
UNSUPPORTED(cudaMemcpyBatchAsync, const void *const *, const void *const *, const size_t *, size_t,
            cudaMemcpyAttributes *, size_t *, size_t, cudaStream_t)
