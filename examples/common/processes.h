/* processes.h - a program that a signal asks to stop; processes that stop together.  SPDX-License-Identifier: MIT */
#ifndef EXAMPLES_COMMON_PROCESSES_H
#define EXAMPLES_COMMON_PROCESSES_H

#include <signal.h>

/* The signal that asked the program to stop; 0 = none. */
extern volatile sig_atomic_t stop_signal;

/* With `caught`, SIGINT and SIGTERM set stop_signal, each of them once: the same signal again ends the program, as both
   do by default and without `caught`. flags: of sigaction, as SA_RESTART. */
void stop_catch(int caught, int flags);

/* Exit status of a stopped program: 128 + signal, as in a shell. */
int stop_code(void);

/* Forks `count` processes, at most 64, and returns in each its number. In the calling process it returns -1 once all
   have ended, with the exit status in *code: 1 where one failed, which ends the others, stop_code() where they were
   stopped, that is, exited with more than 128, else 0; or, without ended processes, -2 with errno. A stop request to
   the calling process is forwarded. Call it before threads and CUDA are used, which a child may not inherit. */
int processes_begin(int count, int *code);

#endif
