/* program.c - see program.h.  SPDX-License-Identifier: MIT */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "program.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

const char *program_name = "program";

_Noreturn void die(const char *format, ...) {
    static atomic_flag ending = ATOMIC_FLAG_INIT;
    va_list list;
    while (atomic_flag_test_and_set(&ending)) (void)pause();
    fflush(stdout);
    fprintf(stderr, "%s: ", program_name);
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    exit(1);
}

void *get(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) die("out of memory (%zu bytes)", bytes);
    return p;
}
