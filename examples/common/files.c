/* files.c - see files.h.  SPDX-License-Identifier: MIT */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void make_folder_of(const char *path) {
    const size_t length = folder_length(path);
    char *folder = (char *)malloc(length + 1);
    if (!folder) return;
    memcpy(folder, path, length);
    folder[length] = 0;
    if (length) (void)mkdir(folder, 0777);
    free(folder);
}

int file_place_of(file_place *place, const char *path) {
    const size_t length = folder_length(path);
    const char *name = path + length;
    char *folder = (char *)malloc(length + 2), *real = NULL;
    struct stat about;
    size_t capacity;
    memset(place, 0, sizeof *place);
    if (!folder) return 0;
    snprintf(folder, length + 2, "%.*s", length ? (int)length : 1, length ? path : ".");
    real = realpath(folder, NULL);
    capacity = (real ? strlen(real) : strlen(folder)) + strlen(name) + 2;
    place->entry = (char *)malloc(capacity);
    if (place->entry) snprintf(place->entry, capacity, "%s/%s", real ? real : folder, name);
    free(real);
    free(folder);
    place->exists = !stat(path, &about);
    if (place->exists) {
        place->device = (uint64_t)about.st_dev;
        place->inode = (uint64_t)about.st_ino;
    }
    return place->entry != NULL;
}

void file_place_free(file_place *place) {
    free(place->entry);
    memset(place, 0, sizeof *place);
}

int file_place_same(const file_place *a, const file_place *b) {
    return (a->exists && b->exists && a->device == b->device && a->inode == b->inode) || !strcmp(a->entry, b->entry);
}

/* Locks an open file: 1; 0: the file system cannot; -1: another process holds it, or an error, in words. */
static int lock_descriptor(int descriptor, const char *path, file_error *error) {
    struct flock whole;
    memset(&whole, 0, sizeof whole);
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    if (!fcntl(descriptor, F_SETLK, &whole)) return 1;
    if (errno == EACCES || errno == EAGAIN) {
        char who[40] = "";
        if (!fcntl(descriptor, F_GETLK, &whole) && whole.l_type != F_UNLCK && whole.l_pid > 0)
            snprintf(who, sizeof who, " (process %ld)", (long)whole.l_pid);
        fail(error, "%.400s is locked: another run%s writes this output", path, who);
        return -1;
    }
    if (errno == ENOLCK || errno == ENOSYS || errno == EINVAL || errno == EOPNOTSUPP || errno == ENOTSUP) return 0;
    fail(error, "cannot lock %.400s: %s", path, strerror(errno));
    return -1;
}

int file_lock_take(file_lock *lock, const char *path, file_error *error) {
    memset(lock, 0, sizeof *lock);
    lock->descriptor = -1;
    for (int attempt = 0; attempt < 100; attempt++) {
        const int descriptor = open(path, O_RDWR | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
        struct stat mine, there;
        int locked;
        if (descriptor < 0) return fail(error, "cannot create %.400s: %s", path, strerror(errno));
        if (fstat(descriptor, &mine) || !S_ISREG(mine.st_mode) || mine.st_size) {
            close(descriptor);
            return fail(error, "%.400s is there, but it is no lock file: it is not empty", path);
        }
        locked = lock_descriptor(descriptor, path, error);
        if (locked < 0) {
            close(descriptor);
            return 0;
        }
        /* The previous holder may have removed the file between open and lock. */
        if (stat(path, &there) || there.st_dev != mine.st_dev || there.st_ino != mine.st_ino) {
            close(descriptor);
            continue;
        }
        lock->path = (char *)malloc(strlen(path) + 1);
        if (!lock->path) {
            close(descriptor);
            return fail(error, "out of memory");
        }
        strcpy(lock->path, path);
        lock->descriptor = descriptor;
        lock->held = locked;
        return 1;
    }
    return fail(error, "cannot lock %.400s: other runs take it again and again", path);
}

void file_lock_release(file_lock *lock) {
    if (lock->descriptor >= 0) {
        unlink(lock->path);
        close(lock->descriptor);
    }
    free(lock->path);
    memset(lock, 0, sizeof *lock);
    lock->descriptor = -1;
}
