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

#define ST_MAX_RANK 8

typedef struct st_error { char text[512]; } st_error;

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
    const st_pair *metadata;    /* what stands under "__metadata__" */
    int64_t count, metadata_count;
    const unsigned char *data;  /* the data section; tensors may be unaligned */
    struct st_inside *inside;
} st_file;

/* NULL, or the sentence that says what this build lacks to read and write. */
const char *st_missing(void);

/* Bits of a dtype's element, 0 if unknown. */
int32_t st_dtype_bits(const char *dtype);

/* Opens and checks a file, for reading only. After a failure there is nothing to close. */
int st_open(st_file *file, const char *path, st_error *error);
void st_close(st_file *file);

/* NULL where there is no such name or key. */
const st_tensor *st_find(const st_file *file, const char *name);
const char *st_metadata(const st_file *file, const char *key);

/* Writing: the header comes from tensors (name, dtype, rank, shape), whose begin and bytes are filled in, in the order
   given. Then their bytes are written in any order, and the commit puts the file in place of `path` in one move.
   Until then a file that stands there is untouched; st_abandon leaves it so. The writer is gone after either. */
typedef struct st_writer {
    int descriptor;
    int64_t data_at, data_bytes;
    char *path, *temporary;
} st_writer;

int st_create(st_writer *writer, const char *path, st_tensor *tensors, int64_t count, const st_pair *metadata,
              int64_t metadata_count, st_error *error);
int st_write(st_writer *writer, int64_t at, const void *data, int64_t bytes, st_error *error);
int st_commit(st_writer *writer, st_error *error);
void st_abandon(st_writer *writer);

#endif
