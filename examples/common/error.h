/* error.h - why a function failed, in words.  SPDX-License-Identifier: MIT */
#ifndef EXAMPLES_COMMON_ERROR_H
#define EXAMPLES_COMMON_ERROR_H

#include <stdarg.h>
#include <stdio.h>

typedef struct common_error { char text[768]; } common_error;

/* Writes the reason, unless error is NULL, and returns 0, as functions that fail do. */
static inline int fail(common_error *error, const char *format, ...) {
    va_list list;
    if (!error) return 0;
    va_start(list, format);
    vsnprintf(error->text, sizeof error->text, format, list);
    va_end(list);
    return 0;
}

#endif
