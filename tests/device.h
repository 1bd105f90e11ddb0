/* device.h - GPU memory of the test harness: one arena, so that all of it is looked at with one copy. Linked only into
   builds that hold the CUDA engines (HAVE_CUDA). */
#ifndef GMM_TESTS_DEVICE_H
#define GMM_TESTS_DEVICE_H

#include "gmm.h"

/* Number of GPUs that gmm can use; 0 without a driver. */
int device_count(void);
/* Opens device 0 with an arena of `bytes` and a stream. NULL on failure, with a text. */
gmm_stream device_open(size_t bytes, const char **why);
void device_close(void);
/* Bytes of the device's memory that are free. */
size_t device_memory(size_t *total);

/* Memory from the arena at `alignment`, or NULL if it is used up; separately with cudaMalloc if `huge`. Reset frees. */
void *device_alloc(size_t bytes, size_t alignment, int huge);
void device_reset(void);

/* Put, copy and set come before what the stream takes later, and for another stream after device_wait; the host's
   memory is free for other use on return. Get waits for the stream. */
void device_put(void *device, const void *host, size_t bytes);
void device_get(void *host, const void *device, size_t bytes);
void device_copy(void *to, const void *from, size_t bytes);
void device_set(void *device, int byte, size_t bytes);

/* Waits for the stream; NULL, or the text of the error it found. */
const char *device_wait(void);

/* Host copy of a place in the arena as of the last device_look, which copies all that is in use. */
void device_fetch(void);
const unsigned char *device_host_bytes(const void *device);

/* Captures what is enqueued in between as a graph; enqueues it again. NULL, or the text of an error. */
const char *device_begin_capture(void);
const char *device_end_capture(void **graph);
const char *device_replay(void *graph);
void device_graph_free(void *graph);

/* Seconds that what is enqueued between both calls takes on the GPU; stop waits for it. NULL, or an error's text. */
const char *device_clock_start(void);
const char *device_clock_stop(double *seconds);

/* What a block of device_stamp's kernel saw: the GPU's clock in nanoseconds, and its multiprocessor. */
typedef struct device_stamp { uint64_t begin, end, processor; } device_stamp;
/* Enqueues `blocks` blocks that each take a multiprocessor's whole shared memory if `whole`, stay for `nanoseconds`,
   and then write their stamps. NULL, or the text of an error. */
const char *device_stamps(gmm_stream stream, device_stamp *to, int blocks, int whole, uint64_t nanoseconds);
int device_processors(void);

/* Enqueues a kernel that lets the next one start at once and copies `words` of 4 bytes of device memory `nanoseconds`
   after it has begun itself. Needs compute capability 9.0. NULL, or the text of an error. */
const char *device_late_copy(void *to, const void *from, int words, uint64_t nanoseconds);

#endif
