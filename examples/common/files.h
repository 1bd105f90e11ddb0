/* files.h - for programs that write files beside those they read: folders, hashes, paths compared, and a lock.
 * SPDX-License-Identifier: MIT
 */
#ifndef EXAMPLES_COMMON_FILES_H
#define EXAMPLES_COMMON_FILES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "error.h"

typedef common_error file_error;

/* The length of a path's folder, with its slash; 0 = none is named. */
static inline size_t folder_length(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) + 1 : 0;
}

/* FNV-1a. HASH_BEGIN is the hash of nothing; a further piece continues the hash of those before. */
#define HASH_BEGIN 14695981039346656037u
static inline uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 1099511628211u;
    return hash;
}

/* Makes the folder of a path where its parent is there. Where that fails, opening the file says why. */
void make_folder_of(const char *path);

/* The file that a path names, if it exists, and its directory entry, which may not exist yet. */
typedef struct file_place {
    char *entry;            /* the folder with links resolved, and the last name */
    uint64_t device, inode; /* of the file, links followed */
    int exists;
} file_place;

/* Returns 0 without memory. */
int file_place_of(file_place *place, const char *path);
void file_place_free(file_place *place);

/* Whether writing or removing one would change the other. */
int file_place_same(const file_place *a, const file_place *b);

/* A lock between processes: an empty file that exists while it is held, and a record lock of the system on it, which
   ends with its process. A lock file that an ended process left is reused. */
typedef struct file_lock {
    char *path;
    int descriptor;
    int held; /* 0: the file system supports no locks */
} file_lock;

/* Returns 1, or 0 with an error where another process holds the lock or the file cannot be made. */
int file_lock_take(file_lock *lock, const char *path, file_error *error);
void file_lock_release(file_lock *lock);

#endif
