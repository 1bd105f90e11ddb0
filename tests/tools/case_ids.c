/* case_ids.c - see case_ids.h. */
#include "case_ids.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *need(void *p) {
    if (p) return p;
    fprintf(stderr, "case_ids: no memory\n");
    exit(1);
}

static void add(case_ids *list, const char *text) {
    if (list->count == list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 1024;
        list->id = (char **)need(realloc(list->id, (size_t)list->capacity * sizeof *list->id));
    }
    list->id[list->count] = (char *)need(malloc(strlen(text) + 1));
    strcpy(list->id[list->count++], text);
}

void case_ids_expand(case_ids *list, const char *text) {
    const char *open = strchr(text, '{'), *close = open ? strchr(open, '}') : NULL, *from;
    if (!open || !close) {
        add(list, text);
        return;
    }
    for (from = open + 1; from <= close; from++) {
        const size_t length = strcspn(from, ",}");
        const size_t before = (size_t)(open - text) - (length == 0 && open > text);
        char *one = (char *)need(malloc(strlen(text) + 1));
        memcpy(one, text, before);
        memcpy(one + before, from, length);
        strcpy(one + before + length, close + 1);
        case_ids_expand(list, one);
        free(one);
        from += length;
    }
}

void case_ids_free(case_ids *list) {
    for (int i = 0; i < list->count; i++) free(list->id[i]);
    free(list->id);
    memset(list, 0, sizeof *list);
}
