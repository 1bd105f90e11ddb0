/* checkpoint_keys.h - names of a checkpoint's tensors: listed by pattern, and searched for what is missing.
 * SPDX-License-Identifier: MIT
 */
#ifndef EXAMPLES_COMMON_CHECKPOINT_KEYS_H
#define EXAMPLES_COMMON_CHECKPOINT_KEYS_H

#include "gmm.h"

/* Names by pattern, in order: digits that are a whole segment of a name, or the end of its last one, become N. */
typedef struct key_patterns {
    char **texts;
    int64_t *names; /* [count] how many */
    int64_t count;
} key_patterns;

/* pattern_of[i] is the pattern of name i.  Returns 0 without memory. */
int key_patterns_of(key_patterns *patterns, const char *const *names, int64_t count, int64_t *pattern_of);
void key_patterns_free(key_patterns *patterns);

/* What a source lacks of what its own keys ask for:
       experts     below the highest of any layer or, where a layer has a router, below the router's rows; `experts` of
                   key_inventory_of instead if it is not 0
       members     FC1, FC2, gate, up, router or biases of a layer that the other experts or layers have
       layers      numbers between the lowest and the highest that no key has
   Keys are read as gmm_ckpt_scan reads them; scales are left to it. Where prefixes are ambiguous nothing is found. */
typedef struct key_inventory {
    char **missing;        /* sentences */
    int64_t missing_count;
    char **left_out;       /* [parts][tensors] 1: of a layer that lacks something */
    int32_t parts;
    int64_t left_out_count, layers_left_out;
    int64_t matched;       /* keys that belong to the scheme */
} key_inventory;

/* Returns 0 without memory. */
int key_inventory_of(key_inventory *inventory, const gmm_ckpt_source *source, int64_t experts);
void key_inventory_free(key_inventory *inventory);

#endif
