/* options.h - a command line described by a table.  SPDX-License-Identifier: MIT */
#ifndef EXAMPLES_COMMON_OPTIONS_H
#define EXAMPLES_COMMON_OPTIONS_H

#include <stddef.h>

#include "error.h"

/* What `value` points to: int64_t (INTEGER; SWITCH, which is 0 or 1 and takes no value), double, const char *. */
typedef enum option_kind {
    OPTION_INTEGER,
    OPTION_SWITCH,
    OPTION_REAL,
    OPTION_CHOICE, /* one of choices, "a|b|c" */
    OPTION_TEXT    /* choices: what the help calls it; "" = FILE */
} option_kind;

typedef struct option {
    const char *name;       /* without the dashes */
    option_kind kind;
    int mark;               /* for the caller; with & 1 a star stands in the help, with & 2 a plus */
    void *value;
    const char *initial;
    double low, high;       /* of numbers */
    const char *choices, *help;
    int given;              /* set by options_parse: the command line states it */
} option;

typedef common_error option_error;

/* Fills every value from `initial`, then from "--name value", "--name=value" and "--switch". 1, or 0 with an error. */
int options_parse(option *list, int count, int argc, char **argv, option_error *error);

/* Fills one value; texts are kept by address. `where` opens the message, before the option's name. */
int option_set(const option *o, const char *text, const char *where, option_error *error);

/* The value as option_set takes it. */
void option_text(const option *o, char *text, size_t size);

/* One line per option. */
void options_print(const option *list, int count);

#endif
