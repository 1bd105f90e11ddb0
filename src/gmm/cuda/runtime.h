/* --- The CUDA row of the runtime table. Each function makes its CUDA call on the context's device, and then makes the
   device current again that was current before. --- */

#ifdef __CUDACC__

/* Makes one CUDA call on the context's device and returns its status; ends a function after its checks. */
#define GMM__DEVICE_CALL(function, call) \
    int current; \
    cudaError_t e = gmm__cuda_enter(self, &current); \
    if (e == cudaSuccess) e = (call); \
    return gmm__cuda_leave(self, function, current, e)

static gmm_status gmm__cuda_rt_stream_create(void *self, int32_t priority, gmm_stream *out) {
    const gmm_status s = gmm__rt_open(self, "stream_create", NULL, out, "out");
    if (s != GMM_OK) return s;
    *out = NULL;
    GMM__DEVICE_CALL("stream_create", cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, priority));
}
static gmm_status gmm__cuda_rt_stream_destroy(void *self, gmm_stream stream) {
    const gmm_status s = gmm__rt_open(self, "stream_destroy", stream, self, "self");
    if (s != GMM_OK || !stream) return s;
    GMM__DEVICE_CALL("stream_destroy", cudaStreamDestroy(stream));
}
static gmm_status gmm__cuda_rt_stream_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    const gmm_status s = gmm__rt_open_flags(self, "stream_wait", stream, event, flags);
    /* GMM_EVENT_EXTERNAL makes a node of the graph in a capture, and means nothing outside of one */
    const int node = s == GMM_OK && flags && gmm__capturing((const gmm_context *)self, stream);
    if (s != GMM_OK) return s;
    GMM__DEVICE_CALL("stream_wait",
                     cudaStreamWaitEvent(stream, event, node ? cudaEventWaitExternal : cudaEventWaitDefault));
}
static gmm_status gmm__cuda_rt_stream_sync(void *self, gmm_stream stream) {
    gmm_context *ctx = (gmm_context *)self;
    const gmm_status s = gmm__rt_open(self, "stream_sync", stream, self, "self");
    if (s != GMM_OK) return s;
    if (gmm__capturing(ctx, stream))
        return gmm__fail(&ctx->error, GMM_E_CAPTURE, "gmm_runtime.stream_sync: stream: %p is capturing",
                         (void *)stream);
    GMM__DEVICE_CALL("stream_sync", cudaStreamSynchronize(stream));
}

static gmm_status gmm__cuda_rt_event_create(void *self, gmm_event *out) {
    const gmm_status s = gmm__rt_open(self, "event_create", NULL, out, "out");
    if (s != GMM_OK) return s;
    *out = NULL;
    GMM__DEVICE_CALL("event_create", cudaEventCreateWithFlags(out, cudaEventDisableTiming));
}
static gmm_status gmm__cuda_rt_event_destroy(void *self, gmm_event event) {
    const gmm_status s = gmm__rt_open(self, "event_destroy", NULL, self, "self");
    if (s != GMM_OK || !event) return s;
    GMM__DEVICE_CALL("event_destroy", cudaEventDestroy(event));
}
static gmm_status gmm__cuda_rt_event_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    const gmm_status s = gmm__rt_open_flags(self, "event_record", stream, event, flags);
    const int node = s == GMM_OK && flags && gmm__capturing((const gmm_context *)self, stream);
    if (s != GMM_OK) return s;
    GMM__DEVICE_CALL("event_record", cudaEventRecordWithFlags(event, stream,
                                                              node ? cudaEventRecordExternal
                                                                   : cudaEventRecordDefault));
}
static gmm_status gmm__cuda_rt_event_query(void *self, gmm_event event, int32_t *done) {
    gmm_status s = gmm__rt_open(self, "event_query", NULL, done, "done");
    int current;
    cudaError_t e;
    if (s != GMM_OK || (s = gmm__rt_open(self, "event_query", NULL, event, "event")) != GMM_OK) return s;
    e = gmm__cuda_enter(self, &current);
    if (e == cudaSuccess) e = cudaEventQuery(event);
    if (e == cudaSuccess || e == cudaErrorNotReady) *done = e == cudaSuccess;
    if (e == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* the event is not complete: no error */
        e = cudaSuccess;
    }
    return gmm__cuda_leave(self, "event_query", current, e);
}
static gmm_status gmm__cuda_rt_event_sync(void *self, gmm_event event) {
    const gmm_status s = gmm__rt_open(self, "event_sync", NULL, event, "event");
    if (s != GMM_OK) return s;
    GMM__DEVICE_CALL("event_sync", cudaEventSynchronize(event));
}

/* Rows without gaps are copied as one row, since cudaMemcpy2DAsync limits the pitch. */
static gmm_status gmm__cuda_rt_copy2d(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                      size_t width, size_t height, gmm_stream stream) {
    const gmm__rt_copy copy = { dst, dst_pitch, src, src_pitch, width, height };
    const gmm_status s = gmm__rt_open_copy(self, "copy2d", &copy, stream);
    const int dense = height == 1 || (dst_pitch == width && src_pitch == width);
    if (s != GMM_OK || !width || !height) return s;
    GMM__DEVICE_CALL("copy2d", dense ? cudaMemcpyAsync(dst, src, width * height, cudaMemcpyDefault, stream)
                                   : cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, cudaMemcpyDefault,
                                                       stream));
}
static gmm_status gmm__cuda_rt_copy(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream) {
    const gmm__rt_copy copy = { dst, bytes, src, bytes, bytes, 1 };
    const gmm_status s = gmm__rt_open_copy(self, "copy", &copy, stream);
    if (s != GMM_OK || !bytes) return s;
    GMM__DEVICE_CALL("copy", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream));
}
static gmm_status gmm__cuda_rt_fill2d(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                                      gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill2d", dst, pitch, value, width, height, stream);
    if (s != GMM_OK || !width || !height) return s;
    GMM__DEVICE_CALL("fill2d", height == 1 || pitch == width
                                 ? cudaMemsetAsync(dst, value, width * height, stream)
                                 : cudaMemset2DAsync(dst, pitch, value, width, height, stream));
}
static gmm_status gmm__cuda_rt_fill(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill", dst, bytes, value, bytes, 1, stream);
    if (s != GMM_OK || !bytes) return s;
    GMM__DEVICE_CALL("fill", cudaMemsetAsync(dst, value, bytes, stream));
}
static gmm_status gmm__cuda_rt_is_capturing(void *self, gmm_stream stream, int32_t *capturing) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const gmm_status s = gmm__rt_open(self, "is_capturing", stream, capturing, "capturing");
    int current;
    cudaError_t e;
    if (s != GMM_OK) return s;
    e = gmm__cuda_enter(self, &current);
    if (e == cudaSuccess) e = cudaStreamIsCapturing(stream, &status);
    *capturing = status != cudaStreamCaptureStatusNone;
    return gmm__cuda_leave(self, "is_capturing", current, e);
}

#undef GMM__DEVICE_CALL
#endif /* __CUDACC__ */

