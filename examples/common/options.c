/* options.c - see options.h.  SPDX-License-Identifier: MIT */
#include "options.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whether `text` is one item of a list a|b|c. */
static int is_choice(const char *list, const char *text) {
    const size_t n = strlen(text);
    for (const char *at = list;; at++) {
        const size_t length = strcspn(at, "|");
        if (n && length == n && !memcmp(at, text, n)) return 1;
        at += length;
        if (!*at) return 0;
    }
}

int option_set(const option *o, const char *text, const char *where, option_error *error) {
    char *end = NULL;
    long long integer;
    double real;
    switch (o->kind) {
    case OPTION_INTEGER:
    case OPTION_SWITCH:
        errno = 0;
        integer = strtoll(text, &end, 10);
        if (errno || end == text || *end || (double)integer < o->low || (double)integer > o->high)
            return fail(error, "%s%s takes an integer from %.0f to %.0f, not \"%.100s\"", where, o->name, o->low,
                        o->high, text);
        *(int64_t *)o->value = integer;
        return 1;
    case OPTION_REAL:
        real = strtod(text, &end);
        if (end == text || *end || !(real >= o->low && real <= o->high))
            return fail(error, "%s%s takes a number from %g to %g, not \"%.100s\"", where, o->name, o->low, o->high,
                        text);
        *(double *)o->value = real;
        return 1;
    case OPTION_CHOICE:
        if (!is_choice(o->choices, text))
            return fail(error, "%s%s takes %s, not \"%.100s\"", where, o->name, o->choices, text);
        *(const char **)o->value = text;
        return 1;
    default: *(const char **)o->value = text; return 1;
    }
}

void option_text(const option *o, char *text, size_t size) {
    if (o->kind == OPTION_INTEGER || o->kind == OPTION_SWITCH)
        snprintf(text, size, "%lld", (long long)*(const int64_t *)o->value);
    else if (o->kind == OPTION_REAL)
        snprintf(text, size, "%.17g", *(const double *)o->value);
    else
        snprintf(text, size, "%s", *(const char *const *)o->value);
}

int options_parse(option *list, int count, int argc, char **argv, option_error *error) {
    for (int i = 0; i < count; i++)
        if (!option_set(&list[i], list[i].initial, "--", error)) return 0;
    for (int a = 1; a < argc; a++) {
        const char *name = argv[a][0] == '-' && argv[a][1] == '-' ? argv[a] + 2 : NULL, *value = NULL;
        size_t n = name ? strcspn(name, "=") : 0;
        option *o = NULL;
        for (int i = 0; name && i < count; i++)
            if (strlen(list[i].name) == n && !memcmp(list[i].name, name, n)) o = &list[i];
        if (!o) return fail(error, "unknown option \"%.100s\" (--help lists them)", argv[a]);
        if (name[n] == '=') value = name + n + 1;
        else if (o->kind == OPTION_SWITCH) value = "1";
        else if (a + 1 < argc) value = argv[++a];
        if (!value) return fail(error, "--%s takes a value", o->name);
        if (!option_set(o, value, "--", error)) return 0;
        o->given = 1;
    }
    return 1;
}

void options_print(const option *list, int count) {
    static const char *const arguments[] = {" N", "", " X", " NAME", " FILE"};
    for (int i = 0; i < count; i++) {
        const option *o = &list[i];
        char left[64];
        const int own = o->kind == OPTION_TEXT && *o->choices;
        snprintf(left, sizeof left, "--%s%s%s", o->name, own ? " " : arguments[o->kind], own ? o->choices : "");
        printf("  %-20s%c %s", left, o->mark & 1 ? '*' : o->mark & 2 ? '+' : ' ', o->help);
        if (o->kind != OPTION_SWITCH && *o->initial) printf(" [%s]", o->initial);
        if (o->kind == OPTION_CHOICE) printf("\n%24s%s", "", o->choices);
        putchar('\n');
    }
}
