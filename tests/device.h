/* device.h - GPU memory of the test harness: one arena of each thread, so that one copy downloads all buffers. Linked
   only into builds with the CUDA engines (HAVE_CUDA). */
#ifndef GMM_TESTS_DEVICE_H
#define GMM_TESTS_DEVICE_H

#include "gmm.h"

/* Number of GPUs that gmm can use; 0 without a driver, and where CUDA does not count them. */
int device_count(void);
/* Why CUDA does not count the GPUs, such as a driver that is too old or a broken device; NULL if it does. A machine
   without a GPU or without a driver has none, which is no error. */
const char *device_uncounted(void);
/* Opens device 0 with an arena of `bytes` and a stream. NULL on failure, with a text. */
gmm_stream device_open(size_t bytes, const char **why);
void device_close(void);
/* What follows is enqueued on stream `i` of DEVICE_STREAMS; those before are finished first. */
enum { DEVICE_STREAMS = 8 };
gmm_stream device_use_stream(int i);
/* Whether the device is the emulator (tests/emulator), which loads no PTX, and whose tensor cores add in fp32. */
int device_emulated(void);
/* Whether plans price as on an H200, which needs its number of multiprocessors: on the emulator
   GMM_EMULATOR_PROCESSORS=132. */
int device_prices(void);
/* Bytes of the device's memory that are free. */
size_t device_memory(size_t *total);

/* Memory from the arena at `alignment`, or NULL if it is used up; separately with cudaMalloc if `huge`. Reset frees. */
void *device_alloc(size_t bytes, size_t alignment, int huge);
void device_reset(void);

/* Device memory of `bytes` behind or in front of pages that are not mapped: with `at_end` it ends where the mapping
   does, and is only aligned as far as `bytes` is divisible, else it begins with it. NULL with a text. */
void *device_edge(size_t bytes, int at_end, const char **why);
void device_edges_free(void);

/* Put, copy and set complete before work that is enqueued on the stream later, and for other streams after device_wait;
   the host buffer may be reused on return. Get waits for the stream. */
void device_put(void *device, const void *host, size_t bytes);
void device_get(void *host, const void *device, size_t bytes);
void device_copy(void *to, const void *from, size_t bytes);
void device_set(void *device, int byte, size_t bytes);

/* Waits for the stream; NULL, or the text of the error it found. */
const char *device_wait(void);

/* Host copy of an address of the arena as of the last device_fetch, which downloads the used part of the arena. */
void device_fetch(void);
const unsigned char *device_host_bytes(const void *device);

/* Captures what is enqueued between begin and end as a graph; replay launches it. NULL, or the text of an error. */
const char *device_begin_capture(void);
const char *device_end_capture(void **graph);
const char *device_replay(void *graph);
/* Ends a capture without a graph to replay, and counts its kernels and those whose name contains `part`. */
const char *device_end_capture_counted(const char *part, int *kernels, int *named);
void device_graph_free(void *graph);

/* GPU seconds of what is enqueued between start and stop, which waits for it. NULL, or the text of an error. */
const char *device_clock_start(void);
const char *device_clock_stop(double *seconds);

/* Written by each thread block of device_stamps: the GPU's clock in nanoseconds at its begin and end, and its SM. */
typedef struct device_stamp { uint64_t begin, end, processor; } device_stamp;
/* Enqueues `blocks` thread blocks that stay for `nanoseconds` and then write their stamps; with `whole` each takes all
   shared memory of an SM. NULL, or the text of an error. */
const char *device_stamps(gmm_stream stream, device_stamp *to, int blocks, int whole, uint64_t nanoseconds);
int device_processors(void);

/* Enqueues a kernel that triggers its programmatic dependent launch at once, and copies `words` words of 4 bytes of
   device memory `nanoseconds` after its start. Needs compute capability 9.0. NULL, or the text of an error. */
const char *device_late_copy(void *to, const void *from, int words, uint64_t nanoseconds);
/* On the emulator alone, else 0: until it is called with NULL, kernels that may begin before their predecessor has
   ended find `early` at `at` until they wait for it. */
int device_early_reads(void *at, const void *early, size_t bytes);
/* On the emulator alone, else -1: wgmmas of N = 8 n8 so far, each as often as a warp group has threads. */
int64_t device_wgmmas(int n8);

#endif
