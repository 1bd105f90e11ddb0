/* resume.h - what a training program takes over from a checkpoint, and why it refuses one.
 * SPDX-License-Identifier: MIT
 *
 * Functions return 1 on success; on failure 0, with a sentence in error->text. Nothing is printed or written.
 */
#ifndef EXAMPLES_COMMON_RESUME_H
#define EXAMPLES_COMMON_RESUME_H

#include <stddef.h>
#include <stdint.h>

#include "options.h"
#include "safetensors.h"

/* Bits of option.mark: the option is recorded in checkpoints as config.NAME. */
enum {
    RESUME_FIXED = 1,    /* a resumed run has the checkpoint's value */
    RESUME_FREE = 2,     /* the checkpoint's value unless the command line states another */
    RESUME_OPTIONAL = 4  /* a checkpoint without it was made with the default */
};

/* Lines for the user, one per difference between the checkpoint and the run that continues it. */
typedef struct resume_notes { char text[2048]; } resume_notes;

void resume_note(resume_notes *notes, const char *format, ...);

/* Sets the marked options from the file's metadata, whose texts they keep by address. Refuses a value that contradicts
   the command line and one that the option does not take. */
int resume_options(const option *options, int count, const st_file *file, const char *path, resume_notes *notes,
                   st_error *error);

/* Refuses files of another producer, files with a part of the weights (of EP, ETP or GTP), and layouts of experts other
   than megatron. `glu_block`: size of the blocks of FC1's gate and up rows; 0 = all gate rows first. */
int resume_layout(const st_file *file, const char *path, const char *producer, int64_t *glu_block, st_error *error);

/* A parameter of fp32 matrices in a checkpoint. Those of experts have a tensor each, NAME0, NAME1, ... (indexed), or
   one tensor NAME with a first dimension of experts (grouped). A vector (rows = 1) has no dimension of rows. */
typedef struct stored_param {
    const char *state, *name; /* state: in front of the name, as "optimizer.exp_avg." */
    int count, experts;       /* matrices; whether they are experts' */
    int64_t rows, cols;
} stored_param;

/* Tensors that hold the parameter, and name, dtype and shape of number `i` of these. t->name points to `name`. */
int stored_tensors(const stored_param *p, int grouped);
void stored_tensor(const stored_param *p, int grouped, int i, st_tensor *t, char *name, size_t capacity);

/* Byte in the data section where matrix `e` begins, stored indexed or grouped; used[tensor] becomes 1. */
int stored_find(const st_file *file, const char *path, const stored_param *p, int e, char *used, int64_t *begin,
                st_error *error);

/* Refuses a file with tensors that nothing has used. */
int stored_all_used(const st_file *file, const char *path, const char *used, st_error *error);

#endif
