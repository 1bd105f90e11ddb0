/* process_ranks.h - ranks that are processes. A case starts this program once per rank, with --rank, and waits for all
   of them a bounded time. The ranks share one segment of memory: it holds the job, their reports, the results, and the
   bytes that they exchange. A rank starts by exec, so that it inherits neither CUDA nor the threads of OpenMP. The
   segment is a file without a name (memfd_create), which is gone with the last process that has mapped it.

   The communicator over the segment is for ranks on the CPU alone, whose calls are done on return. It is no part of
   gmm_gtp.h: on GPUs ranks that are processes use NCCL or peer copies, and on the CPU threads of one process
   (gmm_ranks_create) train as well. Needs POSIX threads with robust mutexes (GMM_WITH_CPU_RANKS). */
#ifndef GMM_TESTS_PROCESS_RANKS_H
#define GMM_TESTS_PROCESS_RANKS_H

#include "test.h"

#include "gmm_gtp.h"

enum { PROCESS_RANKS = 4, PROCESS_JOB_BYTES = 256 };

typedef struct process_segment process_segment;

/* What a rank leaves to the case. */
typedef struct process_report {
    int done;       /* 1: the rank has ended by itself; 0: it was killed */
    gmm_status status;
    double seconds; /* the rank's own measurement */
    char text[512];
} process_report;

/* In the case: starts `size` ranks with a copy of `job`, which run `program` of t_add_rank_program, and waits until all
   have ended. Kills those that a signal has stopped once all others have ended, and after `seconds` all. The segment is
   valid until the next call. */
process_segment *processes_run(const char *program, const void *job, size_t job_bytes, size_t result_bytes, int size,
                               double seconds);
const process_report *processes_report(const process_segment *s, int rank);
/* [result_bytes] of all ranks, zeros before they write it. */
unsigned char *processes_result(process_segment *s);

/* In a rank. `argument` is that of --rank. Waits at most `timeout_ms` in each exchange. */
typedef struct process_rank {
    process_segment *segment;
    int rank, size, timeout_ms;
    int fatal_call;       /* the process kills itself in its n-th collective, counted from 1, after half of its data */
    const void *job;      /* a copy of the case's, [PROCESS_JOB_BYTES] */
    process_report *report;
    unsigned char *result; /* of all ranks */
    /* private */
    uint64_t step;        /* barriers so far */
    int calls;
    const char *what;     /* name of the open group; NULL = none */
    gmm_error error;      /* the first failure, which every later call returns */
} process_rank;

/* Maps the segment; 0 if the argument names none. */
int process_join(process_rank *r, const char *argument, int timeout_ms);
/* All-gather of the host: gmm_peers_config.exchange, with the rank as `user`. GMM_E_COMM, and a text in r->error, if a
   rank has ended, has given up, or has not called it in time. */
gmm_status process_exchange(void *rank, const void *mine, void *all, size_t bytes);
/* The communicator of a rank on the CPU. Sums are in fp32 in the order of ranks. Where ranks differ in a call, its size
   or the name of its group, all of them get GMM_E_COMM. */
void process_comm(process_rank *r, gmm_comm *out);

#endif
