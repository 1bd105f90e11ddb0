/* program.h - what every program does with an error.  SPDX-License-Identifier: MIT */
#ifndef EXAMPLES_COMMON_PROGRAM_H
#define EXAMPLES_COMMON_PROGRAM_H

#include <stddef.h>

extern const char *program_name; /* opens messages; main sets it first */

/* Ends the program with a message on stderr, behind what stdout holds. Of threads that call it, one prints. */
_Noreturn void die(const char *format, ...);

/* Zeroed memory; the program ends where there is none. */
void *get(size_t bytes);

#endif
