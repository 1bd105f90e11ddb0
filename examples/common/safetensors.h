/* safetensors.h - reads and writes safetensors files, with the checks that the format asks for.
 * SPDX-License-Identifier: MIT
 *
 * A file is an 8-byte little-endian length, a JSON header of that many bytes, and the data section. Reading maps the
 * file and refuses what breaks a rule: lengths out of bounds, invalid UTF-8 or JSON, duplicate keys, numbers that are
 * not integers of at most 53 bits, offsets out of bounds, gaps, overlaps, sizes that differ from shape times dtype.
 * JSON goes through cJSON: build with -DHAVE_CJSON and -lcjson (Debian: libcjson-dev). Without it everything compiles,
 * and st_missing() tells what lacks. Hosts are little-endian.
 *
 * Functions return 1 on success; on failure 0, with a sentence in error->text. Nothing is printed.
 */
#ifndef EXAMPLES_COMMON_SAFETENSORS_H
#define EXAMPLES_COMMON_SAFETENSORS_H

#include <stdint.h>

#include "error.h"

#define ST_MAX_RANK 8

typedef common_error st_error;

typedef struct st_tensor {
    const char *name;
    char dtype[16];             /* as the file spells it: "F32", "BF16", "F8_E4M3", ... */
    int32_t bits;               /* of an element; 0 = a dtype not known here, whose bytes can only be passed through */
    int32_t rank;
    int64_t shape[ST_MAX_RANK];
    int64_t begin;              /* byte in the data section */
    int64_t bytes;
} st_tensor;

typedef struct st_pair { const char *key, *value; } st_pair;

typedef struct st_file {
    const st_tensor *tensors;   /* in the order of their data */
    const st_pair *metadata;    /* entries of "__metadata__" */
    int64_t count, metadata_count;
    const unsigned char *data;  /* the data section, mapped; tensors may be unaligned */
    int64_t data_bytes;
    struct st_inside *inside;
} st_file;

/* NULL, or the sentence that says what this build lacks to read and write. */
const char *st_missing(void);

/* Bits of a dtype's element, 0 if unknown. */
int32_t st_dtype_bits(const char *dtype);

/* Opens and checks a file, for reading only. After a failure there is nothing to close. */
int st_open(st_file *file, const char *path, st_error *error);
void st_close(st_file *file);

/* Checks a header of `bytes` bytes in memory, as of a file with `data_bytes` behind it: file->data is NULL. */
int st_open_header(st_file *file, const void *header, int64_t bytes, int64_t data_bytes, st_error *error);

/* Reads bytes of the data section by pread instead of through the mapping: bytes that were cut off since the file was
   opened are an error here, but would raise SIGBUS there. */
int st_read(const st_file *file, int64_t at, void *to, int64_t bytes, st_error *error);

/* NULL where there is no such name or key. */
const st_tensor *st_find(const st_file *file, const char *name);
const char *st_metadata(const st_file *file, const char *key);

/* Identifies the state of a file. */
typedef struct st_identity {
    uint64_t inode;
    int64_t size, seconds, nanoseconds; /* of the last change of its bytes, since 1970 */
    uint64_t header;                    /* a hash of the JSON header */
} st_identity;

/* Identity of the opened file, also if another file has its name now. */
int st_identify(const st_file *file, st_identity *identity, st_error *error);

/* A checkpoint: one file, or the files that an index names ("weight_map" of NAME.safetensors.index.json). Every tensor
   of the index stands in its file, every tensor of a file in the index, no name twice. Errors open with the file. */
typedef struct st_set {
    st_file *files;
    char **paths;
    int64_t count;
    char **missing;             /* paths that the index names and where no file is */
    int64_t missing_count;
} st_set;

/* Fails where a file of the index is missing; st_set_open_partial opens the others. */
int st_set_open(st_set *set, const char *path, st_error *error);
int st_set_open_partial(st_set *set, const char *path, st_error *error);
void st_set_close(st_set *set);

/* Writes the index of files that hold these tensors: owner[i] is the file of tensor i. In place in one move. */
int st_write_index(const char *path, const char *const *files, const st_tensor *tensors, const int64_t *owner,
                   int64_t count, st_error *error);

/* Writing: the header comes from tensors (name, dtype, rank, shape), whose begin and bytes are filled in, in the order
   given; of a dtype that is not known here, bytes must be given. Then their bytes are written in any order, and the
   commit puts the file in place of `path` in one move, once all its bytes are on the disk. Until then a file that
   stands there is untouched; st_abandon leaves it so. The writer is gone after either. Neither moves nor removes a file
   that another program put under the temporary name. */
typedef struct st_writer {
    int descriptor;             /* -1: `path` was found finished */
    int resumed;                /* 1: a file of an earlier run goes on */
    int64_t data_at, data_bytes;
    uint64_t header;            /* hash, as st_identity has it */
    char *path, *temporary;
} st_writer;

int st_create(st_writer *writer, const char *path, st_tensor *tensors, int64_t count, const st_pair *metadata,
              int64_t metadata_count, st_error *error);
/* The same under a temporary name of the caller's, which st_suspend leaves behind. A later call with equal tensors and
   metadata takes its bytes over (writer->resumed) if `earlier` identifies it: inode and header are equal, and where the
   file is finished, the time of its last change too. A finished file is also found under `path`: st_write and st_commit
   have nothing to write then. Any other file under the temporary name is removed. */
typedef struct st_resume {
    const char *temporary;
    const st_identity *earlier; /* by st_writer_identify; NULL = begin anew */
    int finished;               /* 1: `earlier` was read after the last st_write and an st_flush */
} st_resume;

int st_create_resumable(st_writer *writer, const char *path, const st_resume *resume, st_tensor *tensors, int64_t count,
                        const st_pair *metadata, int64_t metadata_count, st_error *error);
int st_writer_identify(const st_writer *writer, st_identity *identity, st_error *error);
/* Flushes written bytes to the disk; the temporary file then survives a crash of the machine. */
int st_flush(st_writer *writer, st_error *error);
void st_suspend(st_writer *writer);
int st_write(st_writer *writer, int64_t at, const void *data, int64_t bytes, st_error *error);
/* After an error nothing new stands under `path`, but for one that says so. The temporary file is removed if its bytes
   did not reach the disk; if only renaming it failed, it stays, and the error names it. */
int st_commit(st_writer *writer, st_error *error);
void st_abandon(st_writer *writer);

/* The file of a writer as values, by which other threads and processes write to it, too: st_join opens it for st_write
   and st_flush, st_suspend closes it. Who made the file commits it, after the others' last st_write. */
typedef struct st_handle {
    int64_t data_at, data_bytes;
    uint64_t inode;
    char temporary[4096];
} st_handle;

int st_handle_of(const st_writer *writer, st_handle *handle, st_error *error);
int st_join(st_writer *writer, const st_handle *handle, st_error *error);

/* Flushes the entries of path's folder to the disk. */
int st_sync_folder(const char *path, st_error *error);

#endif
