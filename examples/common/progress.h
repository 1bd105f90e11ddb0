/* progress.h - one status line, rewritten on a terminal; plain lines elsewhere.  SPDX-License-Identifier: MIT */
#ifndef EXAMPLES_COMMON_PROGRESS_H
#define EXAMPLES_COMMON_PROGRESS_H

#include <stdint.h>
#include <stdio.h>

typedef struct progress {
    FILE *out;
    int terminal;          /* 1: out is a terminal, and its last line is the status line */
    int shown;             /* the status line holds text */
    int64_t first, total;
    double began, drawn;
} progress;

/* Seconds of a monotonic clock. */
double progress_seconds(void);

/* Counts from `first` to `total`. With `quiet`, the status line is never drawn. */
progress progress_begin(FILE *out, int64_t first, int64_t total, int quiet);

/* Draws bar, share, time left and `text`, at most ten times a second; nothing where out is no terminal. */
void progress_update(progress *p, int64_t done, const char *text);

/* Removes the status line, so that ordinary output can follow. */
void progress_clear(progress *p);

#endif
