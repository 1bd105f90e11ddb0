/* resume.c - see resume.h.  SPDX-License-Identifier: MIT */
#include "resume.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gmm.h"

enum { NAME_CAPACITY = 200, SHAPE_CAPACITY = 160 };

void resume_note(resume_notes *notes, const char *format, ...) {
    const size_t used = strlen(notes->text);
    va_list list;
    va_start(list, format);
    vsnprintf(notes->text + used, sizeof notes->text - used, format, list);
    va_end(list);
}

/* -------------------------------------------------------------------------------------------------- Metadata --- */

static int resume_option(const option *o, const st_file *file, const char *path, resume_notes *notes,
                         st_error *error) {
    union { int64_t integer; double real; const char *text; } value;
    char key[64], where[300], stated[64], stored[64];
    option read = *o;
    option_error wrong;
    const char *text;
    snprintf(key, sizeof key, "config.%s", o->name);
    snprintf(where, sizeof where, "%.200s: config.", path);
    text = st_metadata(file, key);
    if (!text && !(o->mark & RESUME_OPTIONAL)) return fail(error, "%.300s: the checkpoint lacks %s", path, key);
    if (!text && !o->given) resume_note(notes, "%s: not in the checkpoint, so %s\n", o->name, o->initial);
    if (!text) text = o->initial;
    read.value = &value;
    if (!option_set(&read, text, where, &wrong)) return fail(error, "%s", wrong.text);
    if (!o->given) return option_set(o, text, where, &wrong);
    option_text(o, stated, sizeof stated);
    option_text(&read, stored, sizeof stored);
    if (!strcmp(stated, stored)) return 1;
    if (!(o->mark & RESUME_FREE))
        return fail(error, "--%s %s contradicts the checkpoint %.300s, which has %s", o->name, stated, path, stored);
    resume_note(notes, "%s: %s in the checkpoint, %s from here on\n", o->name, stored, stated);
    return 1;
}

int resume_options(const option *options, int count, const st_file *file, const char *path, resume_notes *notes,
                   st_error *error) {
    for (int i = 0; i < count; i++)
        if (options[i].mark && !resume_option(&options[i], file, path, notes, error)) return 0;
    return 1;
}

int resume_layout(const st_file *file, const char *path, const char *producer, int64_t *glu_block, st_error *error) {
    static const char *const parts[] = {"ep", "etp", "gtp"};
    const char *made = st_metadata(file, "producer"), *layout = st_metadata(file, "gmm.layout");
    const char *block = st_metadata(file, "gmm.glu_block");
    char *end = NULL;
    *glu_block = 0;
    if (!made || strcmp(made, producer))
        return fail(error, "%.300s: a safetensors file, but no checkpoint of train_moe (its producer is \"%.60s\")",
                    path, made ? made : "");
    for (int i = 0; i < 3; i++) {
        char key[16];
        const char *part;
        snprintf(key, sizeof key, "gmm.%s", parts[i]);
        part = st_metadata(file, key);
        if (part && strcmp(part, "0/1"))
            return fail(error, "%.300s: it holds part %.30s of the weights by %s; convert_checkpoint --in-%s joins "
                        "such files", path, part, key, parts[i]);
    }
    if (layout && strcmp(layout, "megatron")) {
        if (gmm_ckpt_scheme_of(layout))
            return fail(error, "%.300s: its experts have the layout %.60s: convert_checkpoint --from %.60s "
                        "--to indexed makes a file that can be resumed", path, layout, layout);
        return fail(error, "%.300s: the layout \"%.60s\" of its experts is unknown", path, layout);
    }
    if (!block) return 1;
    *glu_block = strtoll(block, &end, 10);
    if (end == block || *end || *glu_block < 0 || *glu_block > INT32_MAX)
        return fail(error, "%.300s: its metadata has no valid gmm.glu_block: \"%.60s\"", path, block);
    return 1;
}

/* --------------------------------------------------------------------------------------------------- Tensors --- */

int stored_tensors(const stored_param *p, int grouped) { return p->experts && grouped ? 1 : p->count; }

void stored_tensor(const stored_param *p, int grouped, int i, st_tensor *t, char *name, size_t capacity) {
    memset(t, 0, sizeof *t);
    if (p->experts && !grouped) snprintf(name, capacity, "%s%s%d", p->state, p->name, i);
    else snprintf(name, capacity, "%s%s", p->state, p->name);
    t->name = name;
    strcpy(t->dtype, "F32");
    if (p->experts && grouped) t->shape[t->rank++] = p->count;
    if (p->rows > 1) t->shape[t->rank++] = p->rows;
    t->shape[t->rank++] = p->cols;
}

/* Dtype and shape as text: "F32 [4, 64, 32]". */
static void describe_shape(const st_tensor *t, char *text) {
    size_t used = (size_t)snprintf(text, SHAPE_CAPACITY, "%s [", t->dtype);
    for (int i = 0; i < t->rank && used + 24 < SHAPE_CAPACITY; i++)
        used += (size_t)snprintf(text + used, SHAPE_CAPACITY - used, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    snprintf(text + used, SHAPE_CAPACITY - used, "]");
}

/* How many of a parameter's experts the file names one after another. */
static int named_experts(const st_file *file, const stored_param *p) {
    st_tensor t;
    char name[NAME_CAPACITY];
    int n = 0;
    do stored_tensor(p, 0, n, &t, name, sizeof name);
    while (st_find(file, name) && ++n);
    return n;
}

int stored_find(const st_file *file, const char *path, const stored_param *p, int e, char *used, int64_t *begin,
                st_error *error) {
    st_tensor wanted;
    const st_tensor *found;
    char name[NAME_CAPACITY], has[SHAPE_CAPACITY], makes[SHAPE_CAPACITY];
    int grouped = 0;
    stored_tensor(p, 0, e, &wanted, name, sizeof name);
    found = st_find(file, name);
    if (!found && p->experts) {
        stored_tensor(p, 1, 0, &wanted, name, sizeof name);
        grouped = (found = st_find(file, name)) != NULL;
    }
    if (!found && p->experts) {
        const int n = named_experts(file, p);
        if (n) return fail(error, "%.300s: %s has %d experts, the checkpoint's configuration %d", path, name, n,
                           p->count);
        return fail(error, "%.300s: the checkpoint lacks the tensor %s, and %s0 too", path, name, name);
    }
    if (!found) return fail(error, "%.300s: the checkpoint lacks the tensor %s", path, name);
    if (grouped && found->rank == wanted.rank && found->shape[0] != p->count)
        return fail(error, "%.300s: %s has %lld experts, the checkpoint's configuration %d", path, name,
                    (long long)found->shape[0], p->count);
    describe_shape(found, has);
    describe_shape(&wanted, makes);
    if (strcmp(has, makes))
        return fail(error, "%.300s: %s is %s, the checkpoint's configuration makes it %s", path, name, has, makes);
    used[found - file->tensors] = 1;
    *begin = found->begin + (grouped ? (int64_t)e * p->rows * p->cols * (int64_t)sizeof(float) : 0);
    return 1;
}

int stored_all_used(const st_file *file, const char *path, const char *used, st_error *error) {
    const char *first = NULL;
    int64_t n = 0;
    for (int64_t i = file->count - 1; i >= 0; i--) {
        if (used[i]) continue;
        first = file->tensors[i].name;
        n++;
    }
    if (n == 1) return fail(error, "%.300s: its configuration makes no tensor %.200s", path, first);
    if (n) return fail(error, "%.300s: its configuration does not make %lld of its tensors, as %.200s", path,
                       (long long)n, first);
    return 1;
}
