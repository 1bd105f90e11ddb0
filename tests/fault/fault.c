/* fault.c - preloaded into a program under test: one of its system calls fails, or it is killed or stopped there.
 * SPDX-License-Identifier: MIT
 *
 *     FAULT=CALL:NUMBER:ACTION LD_PRELOAD=fault.so program
 *
 * CALL is fsync, rename, unlink or pwrite; NUMBER counts from 1; before the call is made, ACTION is `fail` (the call
 * returns -1 with errno EIO and is not made), `kill` (SIGKILL) or `stop` (SIGSTOP, and the call is made afterwards).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

/* The next definition of a function, as a pointer of any function type. */
static void next(const char *name, void *function) {
    void *found = dlsym(RTLD_NEXT, name);
    memcpy(function, &found, sizeof found);
}

/* Whether the call fails here. */
static int fault(const char *call) {
    static int count;
    const char *wanted = getenv("FAULT");
    char name[16] = "", action[16] = "";
    int number = 0;
    if (!wanted || sscanf(wanted, "%15[^:]:%d:%15s", name, &number, action) != 3 || strcmp(name, call) ||
        ++count != number)
        return 0;
    if (!strcmp(action, "kill")) raise(SIGKILL);
    if (!strcmp(action, "stop")) raise(SIGSTOP);
    errno = EIO;
    return !strcmp(action, "fail");
}

int fsync(int descriptor) {
    int (*real)(int);
    next("fsync", &real);
    return fault("fsync") ? -1 : real(descriptor);
}

int rename(const char *from, const char *to) {
    int (*real)(const char *, const char *);
    next("rename", &real);
    return fault("rename") ? -1 : real(from, to);
}

int unlink(const char *path) {
    int (*real)(const char *);
    next("unlink", &real);
    return fault("unlink") ? -1 : real(path);
}

ssize_t pwrite(int descriptor, const void *from, size_t bytes, off_t at) {
    ssize_t (*real)(int, const void *, size_t, off_t);
    next("pwrite", &real);
    return fault("pwrite") ? -1 : real(descriptor, from, bytes, at);
}
