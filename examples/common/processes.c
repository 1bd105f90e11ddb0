/* processes.c - see processes.h.  SPDX-License-Identifier: MIT */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "processes.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <sys/wait.h>
#include <unistd.h>

volatile sig_atomic_t stop_signal;

static void note_stop(int number) { stop_signal = number; }

void stop_catch(int caught, int flags) {
    const int numbers[2] = {SIGINT, SIGTERM};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = caught ? note_stop : SIG_DFL;
    action.sa_flags = flags | (caught ? (int)SA_RESETHAND : 0);
    for (int i = 0; i < 2; i++) (void)sigaction(numbers[i], &action, NULL);
}

int stop_code(void) { return 128 + (stop_signal ? (int)stop_signal : SIGTERM); }

static void send_all(const pid_t *pids, int count, int number) {
    for (int i = 0; i < count; i++)
        if (pids[i] > 0) (void)kill(pids[i], number);
}

int processes_begin(int count, int *code) {
    pid_t pids[64];
    int failed = 0, stopped = 0, status;
    (void)signal(SIGCHLD, SIG_DFL); /* where it is ignored, wait returns no status */
    for (int i = 0; i < count; i++) {
        pids[i] = fork();
        if (pids[i] < 0) {
            const int reason = errno;
            send_all(pids, i, SIGKILL);
            errno = reason;
            return -2;
        }
#ifdef __linux__
        if (pids[i] == 0) (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
        if (pids[i] == 0) return i;
    }
    stop_catch(1, 0); /* no SA_RESTART: a signal ends wait */
    for (int left = count; left > 0;) {
        const pid_t done = wait(&status);
        int ends;
        if (done < 0 && errno != EINTR) return -2;
        if (done < 0) {
            /* A signal to the whole process group, as Ctrl-C is, has reached the others too. The same one again would
               end them at once; the other one does not. */
            send_all(pids, count, stop_signal == SIGTERM ? SIGINT : SIGTERM);
            continue;
        }
        ends = WIFEXITED(status) && WEXITSTATUS(status) > 128; /* it was stopped, and all stop alike */
        for (int i = 0; i < count; i++)
            if (pids[i] == done) pids[i] = 0;
        if (status && !ends && !failed) send_all(pids, count, SIGKILL);
        failed |= status != 0 && !ends;
        stopped |= ends;
        left--;
    }
    *code = failed ? 1 : stopped ? stop_code() : 0;
    return -1;
}
