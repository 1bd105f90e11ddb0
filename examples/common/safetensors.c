/* safetensors.c - see safetensors.h.  SPDX-License-Identifier: MIT */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* fallocate, sync_file_range */
#elif !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#include "safetensors.h"
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef HAVE_CJSON
#include <cjson/cJSON.h>
#endif

enum { HEADER_LIMIT = 100000000 }; /* bytes, as the reference implementation has it */

struct st_inside {
    void *map;
    size_t map_bytes;
    int descriptor;
    int64_t data_at;
    st_tensor *tensors;
    st_pair *metadata;
    const st_tensor **by_name;
    void *json; /* owns the strings */
};

const char *st_missing(void) {
#ifdef HAVE_CJSON
    return NULL;
#else
    return "this build cannot read or write safetensors files: it was compiled without cJSON "
           "(install libcjson-dev and build again)";
#endif
}

int32_t st_dtype_bits(const char *dtype) {
    static const struct { const char *name; int32_t bits; } known[] = {
        {"BOOL", 8}, {"U8", 8}, {"I8", 8}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8},
        {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F4", 4},
        {"U16", 16}, {"I16", 16}, {"F16", 16}, {"BF16", 16}, {"U32", 32}, {"I32", 32}, {"F32", 32},
        {"U64", 64}, {"I64", 64}, {"F64", 64}, {"C64", 64}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (!strcmp(dtype, known[i].name)) return known[i].bits;
    return 0;
}

/* Bytes of shape times dtype; -1 where they do not fit 63 bits or are no whole number. */
static int64_t tensor_bytes(const st_tensor *t) {
    uint64_t product = (uint64_t)t->bits;
    int empty = 0;
    for (int32_t i = 0; i < t->rank; i++) empty |= t->shape[i] == 0;
    if (empty) return 0;
    for (int32_t i = 0; i < t->rank; i++) {
        if (t->shape[i] < 0 || product > (uint64_t)INT64_MAX / (uint64_t)t->shape[i]) return -1;
        product *= (uint64_t)t->shape[i];
    }
    return product % 8 ? -1 : (int64_t)(product / 8);
}

/* Length of the well-formed UTF-8 sequence at s, 0 if there is none. */
static size_t utf8_length(const unsigned char *s, size_t left) {
    unsigned char c = s[0];
    size_t n = c < 0x80 ? 1 : c >= 0xC2 && c <= 0xDF ? 2 : (c & 0xF0) == 0xE0 ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
    if (n == 0 || n > left) return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    if (c == 0xE0 && s[1] < 0xA0) return 0; /* overlong encoding */
    if (c == 0xED && s[1] > 0x9F) return 0; /* surrogates */
    if (c == 0xF0 && s[1] < 0x90) return 0;
    if (c == 0xF4 && s[1] > 0x8F) return 0; /* above U+10FFFF */
    return n;
}

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const st_tensor *const *)a)->name, (*(const st_tensor *const *)b)->name);
}

/* Pointers to the tensors in name order; NULL with an error if a name occurs twice. */
static const st_tensor **sort_names(const st_tensor *tensors, int64_t count, st_error *error) {
    const st_tensor **names = (const st_tensor **)malloc(((size_t)count + 1) * sizeof *names);
    if (!names) {
        fail(error, "out of memory");
        return NULL;
    }
    for (int64_t i = 0; i < count; i++) names[i] = &tensors[i];
    qsort(names, (size_t)count, sizeof *names, compare_names);
    for (int64_t i = 1; i < count; i++) {
        if (strcmp(names[i - 1]->name, names[i]->name)) continue;
        fail(error, "the header holds the key \"%.200s\" twice", names[i]->name);
        free(names);
        return NULL;
    }
    return names;
}

void st_close(st_file *file) {
    struct st_inside *in = file->inside;
    if (in) {
        if (in->map) munmap(in->map, in->map_bytes);
        if (in->descriptor >= 0) close(in->descriptor);
#ifdef HAVE_CJSON
        cJSON_Delete((cJSON *)in->json);
#endif
        free(in->tensors);
        free(in->metadata);
        free(in->by_name);
        free(in);
    }
    memset(file, 0, sizeof *file);
}

const st_tensor *st_find(const st_file *file, const char *name) {
    st_tensor key;
    const st_tensor *want = &key, **hit;
    if (!file->count) return NULL;
    key.name = name;
    hit = (const st_tensor **)bsearch(&want, file->inside->by_name, (size_t)file->count, sizeof *hit, compare_names);
    return hit ? *hit : NULL;
}

const char *st_metadata(const st_file *file, const char *key) {
    for (int64_t i = 0; i < file->metadata_count; i++)
        if (!strcmp(file->metadata[i].key, key)) return file->metadata[i].value;
    return NULL;
}

#ifdef HAVE_CJSON

/* Rejects what cJSON accepts: invalid UTF-8, control characters, NUL escapes, numbers that are not integers or that a
   double cannot represent, literals. cJSON checks the grammar. */
static int scan_header(const unsigned char *s, size_t size, st_error *error) {
    int in_string = 0;
    for (size_t i = 0; i < size;) {
        size_t n = utf8_length(s + i, size - i);
        if (!n) return fail(error, "the header is not UTF-8 at byte %zu", i);
        if (in_string) {
            if (s[i] < 0x20) return fail(error, "the header has a control character in a string at byte %zu", i);
            if (s[i] == '"') in_string = 0;
            if (s[i] == '\\') {
                if (size - i >= 6 && !memcmp(s + i + 1, "u0000", 5))
                    return fail(error, "the header has a NUL escape at byte %zu", i);
                n = 2; /* an escaped character does not end the string */
            }
        } else if (s[i] >= '0' && s[i] <= '9') {
            uint64_t value = 0;
            for (n = 0; i + n < size && s[i + n] >= '0' && s[i + n] <= '9'; n++) {
                value = value * 10 + (uint64_t)(s[i + n] - '0');
                if (n >= 16 || value > 9007199254740991u)
                    return fail(error, "the header has an integer above 2^53 - 1 at byte %zu", i);
            }
            if (n > 1 && s[i] == '0') return fail(error, "the header has a leading zero at byte %zu", i);
        } else if (s[i] == '"') {
            in_string = 1;
        } else if (!strchr("{}[],: \t\r\n", s[i]) || s[i] == 0) {
            return fail(error, "the header has an unexpected character (code %d) at byte %zu: only strings, objects, "
                               "arrays and non-negative integers may stand there", s[i], i);
        }
        i += n;
    }
    return 1;
}

static int compare_pairs(const void *a, const void *b) {
    return strcmp(((const st_pair *)a)->key, ((const st_pair *)b)->key);
}

static int read_metadata(const cJSON *json, struct st_inside *in, int64_t *count, st_error *error) {
    const cJSON *item;
    int64_t n = 0;
    if (!cJSON_IsObject(json)) return fail(error, "\"__metadata__\" is not an object");
    in->metadata = (st_pair *)malloc(((size_t)cJSON_GetArraySize(json) + 1) * sizeof *in->metadata);
    if (!in->metadata) return fail(error, "out of memory");
    cJSON_ArrayForEach(item, json) {
        if (!cJSON_IsString(item)) return fail(error, "\"__metadata__\": \"%.200s\" is not a string", item->string);
        in->metadata[n].key = item->string;
        in->metadata[n++].value = item->valuestring;
    }
    qsort(in->metadata, (size_t)n, sizeof *in->metadata, compare_pairs);
    for (int64_t i = 1; i < n; i++)
        if (!strcmp(in->metadata[i - 1].key, in->metadata[i].key))
            return fail(error, "\"__metadata__\" holds the key \"%.200s\" twice", in->metadata[i].key);
    *count = n;
    return 1;
}

static int read_tensor(const cJSON *json, int64_t data_bytes, st_tensor *t, st_error *error) {
    const cJSON *item, *dtype = NULL, *shape = NULL, *offsets = NULL;
    int64_t end, expected;
    memset(t, 0, sizeof *t);
    t->name = json->string;
    if (!cJSON_IsObject(json)) return fail(error, "tensor \"%.200s\" is not an object", t->name);
    cJSON_ArrayForEach(item, json) {
        const cJSON **slot = !strcmp(item->string, "dtype") ? &dtype : !strcmp(item->string, "shape") ? &shape
                           : !strcmp(item->string, "data_offsets") ? &offsets : NULL;
        if (!slot) return fail(error, "tensor \"%.200s\" has the unknown key \"%.100s\"", t->name, item->string);
        if (*slot) return fail(error, "tensor \"%.200s\" has the key \"%.100s\" twice", t->name, item->string);
        *slot = item;
    }
    if (!cJSON_IsString(dtype) || !*dtype->valuestring || strlen(dtype->valuestring) >= sizeof t->dtype)
        return fail(error, "tensor \"%.200s\" has no valid dtype", t->name);
    strcpy(t->dtype, dtype->valuestring);
    t->bits = st_dtype_bits(t->dtype);
    if (!cJSON_IsArray(shape)) return fail(error, "tensor \"%.200s\" has no shape", t->name);
    cJSON_ArrayForEach(item, shape) {
        if (!cJSON_IsNumber(item)) return fail(error, "tensor \"%.200s\": an extent is not an integer", t->name);
        if (t->rank == ST_MAX_RANK)
            return fail(error, "tensor \"%.200s\" has more than %d dimensions", t->name, ST_MAX_RANK);
        t->shape[t->rank++] = (int64_t)item->valuedouble;
    }
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !cJSON_IsNumber(offsets->child) ||
        !cJSON_IsNumber(offsets->child->next))
        return fail(error, "tensor \"%.200s\" has no pair of data_offsets", t->name);
    t->begin = (int64_t)offsets->child->valuedouble;
    end = (int64_t)offsets->child->next->valuedouble;
    if (t->begin > end || end > data_bytes)
        return fail(error, "tensor \"%.200s\" stands at bytes %lld to %lld, outside of the %lld data bytes (is the "
                           "file truncated?)", t->name, (long long)t->begin, (long long)end, (long long)data_bytes);
    t->bytes = end - t->begin;
    expected = t->bits ? tensor_bytes(t) : t->bytes;
    if (expected < 0) return fail(error, "tensor \"%.200s\": shape times dtype is no 63-bit byte count", t->name);
    if (expected != t->bytes)
        return fail(error, "tensor \"%.200s\" takes %lld bytes, but its shape and dtype %s make %lld", t->name,
                    (long long)t->bytes, t->dtype, (long long)expected);
    return 1;
}

static int compare_offsets(const void *a, const void *b) {
    const st_tensor *x = (const st_tensor *)a, *y = (const st_tensor *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* The length at the front of a file of `size` bytes; -1 with an error. */
static int64_t header_length(const unsigned char *bytes, int64_t size, st_error *error) {
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | bytes[i];
    if (length > HEADER_LIMIT)
        fail(error, "not a safetensors file: its first 8 bytes give a header of %llu bytes, more than %d",
             (unsigned long long)length, HEADER_LIMIT);
    else if ((int64_t)length > size - 8)
        fail(error, "truncated, or not a safetensors file: a header of %llu bytes does not fit the file of %lld bytes",
             (unsigned long long)length, (long long)size);
    else if (length < 2 || bytes[8] != '{')
        fail(error, "not a safetensors file: its header is no JSON object");
    else
        return (int64_t)length;
    return -1;
}

static int read_header(struct st_inside *in, st_file *file, const unsigned char *header, int64_t length,
                       int64_t data_bytes, st_error *error) {
    const cJSON *item;
    int64_t next = 0, capacity;
    int seen_metadata = 0;
    char *text;
    if (!scan_header(header, (size_t)length, error)) return 0;

    text = (char *)malloc((size_t)length + 1);
    if (!text) return fail(error, "out of memory");
    memcpy(text, header, (size_t)length);
    text[length] = 0;
    in->json = cJSON_ParseWithLengthOpts(text, (size_t)length + 1, NULL, 1);
    free(text);
    if (!in->json) return fail(error, "the header is not valid JSON");
    if (!cJSON_IsObject((cJSON *)in->json)) return fail(error, "the header is no JSON object");

    capacity = cJSON_GetArraySize((cJSON *)in->json);
    in->tensors = (st_tensor *)malloc(((size_t)capacity + 1) * sizeof *in->tensors);
    if (!in->tensors) return fail(error, "out of memory");
    cJSON_ArrayForEach(item, (const cJSON *)in->json) {
        if (!strcmp(item->string, "__metadata__")) {
            if (seen_metadata++) return fail(error, "the header holds the key \"__metadata__\" twice");
            if (!read_metadata(item, in, &file->metadata_count, error)) return 0;
        } else if (!read_tensor(item, data_bytes, &in->tensors[file->count++], error)) {
            return 0;
        }
    }
    qsort(in->tensors, (size_t)file->count, sizeof *in->tensors, compare_offsets);
    for (int64_t i = 0; i < file->count; i++) {
        const st_tensor *t = &in->tensors[i];
        if (t->begin != next)
            return fail(error, "tensor \"%.200s\" begins at byte %lld, but the one before it ends at %lld: %s", t->name,
                        (long long)t->begin, (long long)next, t->begin < next ? "an overlap" : "a gap");
        next += t->bytes;
    }
    if (next != data_bytes)
        return fail(error, "the tensors end at byte %lld, but the data section has %lld bytes", (long long)next,
                    (long long)data_bytes);
    in->by_name = sort_names(in->tensors, file->count, error);
    if (!in->by_name) return 0;
    file->tensors = in->tensors;
    file->metadata = in->metadata;
    file->data_bytes = data_bytes;
    return 1;
}

int st_open_header(st_file *file, const void *header, int64_t bytes, int64_t data_bytes, st_error *error) {
    memset(file, 0, sizeof *file);
    file->inside = (struct st_inside *)calloc(1, sizeof *file->inside);
    if (!file->inside) return fail(error, "out of memory");
    file->inside->descriptor = -1;
    if (bytes >= 2 && bytes <= HEADER_LIMIT &&
        read_header(file->inside, file, (const unsigned char *)header, bytes, data_bytes, error))
        return 1;
    if (bytes < 2 || bytes > HEADER_LIMIT) fail(error, "a header of %lld bytes", (long long)bytes);
    st_close(file);
    return 0;
}

int st_open(st_file *file, const char *path, st_error *error) {
    struct stat about;
    struct st_inside *in;
    int descriptor, ok;
    int64_t length;
    memset(file, 0, sizeof *file);
    descriptor = open(path, O_RDONLY | O_NONBLOCK); /* a pipe must not block */
    if (descriptor < 0) return fail(error, "cannot open it: %s", strerror(errno));
    in = (struct st_inside *)calloc(1, sizeof *in);
    if (!in) {
        close(descriptor);
        return fail(error, "out of memory");
    }
    in->descriptor = descriptor;
    file->inside = in;
    if (fstat(descriptor, &about) || !S_ISREG(about.st_mode) || about.st_size < 8) {
        st_close(file);
        return fail(error, "not a safetensors file: it is no regular file of at least 8 bytes");
    }
    in->map_bytes = (size_t)about.st_size;
    in->map = mmap(NULL, in->map_bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (in->map == MAP_FAILED) {
        in->map = NULL;
        ok = fail(error, "cannot map it: %s", strerror(errno));
    } else {
        const unsigned char *bytes = (const unsigned char *)in->map;
        length = header_length(bytes, (int64_t)in->map_bytes, error);
        in->data_at = 8 + length;
        ok = length >= 0 &&
             read_header(in, file, bytes + 8, length, (int64_t)in->map_bytes - in->data_at, error);
        file->data = bytes + in->data_at;
    }
    if (!ok) st_close(file);
    return ok;
}

static char *read_text(const char *path, size_t *size, st_error *error) {
    struct stat about;
    const int descriptor = open(path, O_RDONLY | O_NONBLOCK);
    char *text = NULL;
    if (descriptor < 0 || fstat(descriptor, &about) || !S_ISREG(about.st_mode))
        fail(error, "cannot open it: %s", descriptor < 0 ? strerror(errno) : "it is no regular file");
    else if (about.st_size > HEADER_LIMIT)
        fail(error, "%lld bytes are no index", (long long)about.st_size);
    else if (!(text = (char *)malloc((size_t)about.st_size + 1)))
        fail(error, "out of memory");
    else if (pread(descriptor, text, (size_t)about.st_size, 0) != (ssize_t)about.st_size) {
        fail(error, "cannot read it: %s", strerror(errno));
        free(text);
        text = NULL;
    }
    if (text) text[*size = (size_t)about.st_size] = 0;
    if (descriptor >= 0) close(descriptor);
    return text;
}

typedef struct entry { const char *name, *file; } entry;

static int compare_files(const void *a, const void *b) {
    const entry *x = (const entry *)a, *y = (const entry *)b;
    const int files = strcmp(x->file, y->file);
    return files ? files : strcmp(x->name, y->name);
}

/* The list of an index, sorted by file. */
static entry *index_entries(const cJSON *json, int64_t *count, st_error *error) {
    const cJSON *map = NULL, *item;
    entry *list;
    cJSON_ArrayForEach(item, json) {
        if (!item->string || strcmp(item->string, "weight_map")) continue;
        if (map) return fail(error, "it holds \"weight_map\" twice"), (entry *)NULL;
        map = item;
    }
    if (!cJSON_IsObject(map)) return fail(error, "no index: it has no object \"weight_map\""), (entry *)NULL;
    *count = cJSON_GetArraySize(map);
    list = (entry *)malloc(((size_t)*count + 1) * sizeof *list);
    if (!list) return fail(error, "out of memory"), (entry *)NULL;
    *count = 0;
    cJSON_ArrayForEach(item, map) {
        if (!cJSON_IsString(item) || !*item->valuestring || strchr(item->valuestring, '/') ||
            *item->valuestring == '.') {
            fail(error, "tensor \"%.200s\" names no file beside the index", item->string);
            free(list);
            return NULL;
        }
        list[*count].name = item->string;
        list[(*count)++].file = item->valuestring;
    }
    qsort(list, (size_t)*count, sizeof *list, compare_files);
    return list;
}

static char *beside(const char *path, const char *name) {
    const size_t folder = folder_length(path), capacity = folder + strlen(name) + 1;
    char *joined = (char *)malloc(capacity);
    if (joined) snprintf(joined, capacity, "%.*s%s", (int)folder, path, name);
    return joined;
}

/* Opens the next file of a set; errors open with its path. A file of an index that is not there is noted as missing. */
static int set_add(st_set *set, char *path, int of_index, st_error *error) {
    st_error why;
    st_file *files = (st_file *)realloc(set->files, ((size_t)set->count + 1) * sizeof *files);
    char **paths = (char **)realloc(set->paths, ((size_t)set->count + 1) * sizeof *paths);
    char **missing = (char **)realloc(set->missing, ((size_t)set->missing_count + 1) * sizeof *missing);
    if (files) set->files = files;
    if (paths) set->paths = paths;
    if (missing) set->missing = missing;
    if (!path || !files || !paths || !missing) {
        free(path);
        return fail(error, "out of memory");
    }
    if (of_index && access(path, F_OK) && errno == ENOENT) {
        missing[set->missing_count++] = path;
        return 1;
    }
    if (!st_open(&files[set->count], path, &why)) {
        fail(error, "%.200s: %.500s", path, why.text);
        free(path);
        return 0;
    }
    paths[set->count++] = path;
    return 1;
}

static int set_of_index(st_set *set, const char *path, const entry *list, int64_t count, st_error *error) {
    int missing = 0;
    for (int64_t i = 0, begin = 0; i < count; i++) {
        const st_file *file;
        if (i == begin) {
            const int64_t before = set->missing_count;
            if (!set_add(set, beside(path, list[i].file), 1, error)) return 0;
            missing = set->missing_count > before;
        }
        if (i > begin && !strcmp(list[i].name, list[i - 1].name))
            return fail(error, "%.200s: it holds the key \"%.200s\" twice", path, list[i].name);
        if (missing) {
            if (i + 1 == count || strcmp(list[i + 1].file, list[i].file)) begin = i + 1;
            continue;
        }
        file = &set->files[set->count - 1];
        if (!st_find(file, list[i].name))
            return fail(error, "%.200s: it lacks the tensor \"%.200s\", which the index says it holds",
                        set->paths[set->count - 1], list[i].name);
        if (i + 1 < count && !strcmp(list[i + 1].file, list[i].file)) continue;
        for (int64_t k = 0; k < file->count && file->count != i + 1 - begin; k++) {
            entry key = {file->tensors[k].name, list[i].file};
            if (!bsearch(&key, list + begin, (size_t)(i + 1 - begin), sizeof key, compare_files))
                return fail(error, "%.200s: it holds the tensor \"%.200s\", which the index does not name there",
                            set->paths[set->count - 1], key.name);
        }
        begin = i + 1;
    }
    return 1;
}

static int compare_entry_names(const void *a, const void *b) {
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

/* No name in two files. Sorts the list anew. */
static int set_unique(const char *path, entry *list, int64_t count, st_error *error) {
    qsort(list, (size_t)count, sizeof *list, compare_entry_names);
    for (int64_t i = 1; i < count; i++)
        if (!strcmp(list[i - 1].name, list[i].name))
            return fail(error, "%.200s: it holds the key \"%.200s\" twice, in %.100s and %.100s", path, list[i].name,
                        list[i - 1].file, list[i].file);
    return 1;
}

int st_set_open_partial(st_set *set, const char *path, st_error *error) {
    const size_t length = strlen(path);
    memset(set, 0, sizeof *set);
    if (length < 5 || strcmp(path + length - 5, ".json")) {
        char *copy = (char *)malloc(length + 1);
        if (copy) memcpy(copy, path, length + 1);
        if (set_add(set, copy, 0, error)) return 1;
    } else {
        st_error why;
        size_t size = 0;
        char *text = read_text(path, &size, &why);
        cJSON *json = NULL;
        entry *list = NULL;
        int64_t count = 0;
        int ok = 0;
        for (size_t i = 0, n; text && i < size; i += n)
            if (!(n = text[i] ? utf8_length((const unsigned char *)text + i, size - i) : 0)) {
                fail(&why, "it is not UTF-8 at byte %zu", i);
                free(text);
                text = NULL;
                size = 0;
                n = 1;
            }
        if (text && !(json = cJSON_ParseWithLengthOpts(text, size + 1, NULL, 1))) fail(&why, "it is not valid JSON");
        if (json) list = index_entries(json, &count, &why);
        if (!list) fail(error, "%.200s: %.500s", path, why.text);
        else ok = set_of_index(set, path, list, count, error) && set_unique(path, list, count, error);
        free(list);
        cJSON_Delete(json);
        free(text);
        if (ok) return 1;
    }
    st_set_close(set);
    return 0;
}

#else

int st_open(st_file *file, const char *path, st_error *error) {
    (void)path;
    memset(file, 0, sizeof *file);
    return fail(error, "%s", st_missing());
}

int st_open_header(st_file *file, const void *header, int64_t bytes, int64_t data_bytes, st_error *error) {
    (void)header;
    (void)bytes;
    (void)data_bytes;
    return st_open(file, NULL, error);
}

int st_set_open_partial(st_set *set, const char *path, st_error *error) {
    (void)path;
    memset(set, 0, sizeof *set);
    return fail(error, "%s", st_missing());
}

#endif

int st_set_open(st_set *set, const char *path, st_error *error) {
    if (!st_set_open_partial(set, path, error)) return 0;
    if (!set->missing_count) return 1;
    fail(error, "%.300s: cannot open it: %s (%lld of the %lld files of its index are missing)", set->missing[0],
         strerror(ENOENT), (long long)set->missing_count, (long long)(set->missing_count + set->count));
    st_set_close(set);
    return 0;
}

void st_set_close(st_set *set) {
    for (int64_t i = 0; i < set->count; i++) {
        st_close(&set->files[i]);
        free(set->paths[i]);
    }
    for (int64_t i = 0; i < set->missing_count; i++) free(set->missing[i]);
    free(set->files);
    free(set->paths);
    free(set->missing);
    memset(set, 0, sizeof *set);
}

static int identify(int descriptor, st_identity *identity, struct stat *about, st_error *error) {
    memset(identity, 0, sizeof *identity);
    if (fstat(descriptor, about)) return fail(error, "cannot read its state: %s", strerror(errno));
    identity->inode = (uint64_t)about->st_ino;
    identity->size = (int64_t)about->st_size;
    identity->seconds = (int64_t)about->st_mtim.tv_sec;
    identity->nanoseconds = (int64_t)about->st_mtim.tv_nsec;
    return 1;
}

int st_identify(const st_file *file, st_identity *identity, st_error *error) {
    const struct st_inside *in = file->inside;
    struct stat about;
    if (!identify(in->descriptor, identity, &about, error)) return 0;
    if (about.st_size < (off_t)in->map_bytes) return fail(error, "it became shorter");
    identity->header = hash_bytes(HASH_BEGIN, (const char *)in->map + 8, (size_t)in->data_at - 8);
    return 1;
}

int st_read(const st_file *file, int64_t at, void *to, int64_t bytes, st_error *error) {
    char *p = (char *)to;
    if (at < 0 || bytes < 0 || at > file->data_bytes || bytes > file->data_bytes - at)
        return fail(error, "%lld bytes at %lld leave the data section of %lld bytes", (long long)bytes, (long long)at,
                    (long long)file->data_bytes);
    for (at += file->inside->data_at; bytes > 0;) {
        const ssize_t n = pread(file->inside->descriptor, p, bytes > (1 << 30) ? (size_t)1 << 30 : (size_t)bytes,
                                (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return fail(error, "cannot read: %s", n < 0 ? strerror(errno) : "it became shorter");
        p += n;
        at += n;
        bytes -= n;
    }
    return 1;
}

/* ---------------------------------------------------------------------------------------------------- Writing --- */

typedef struct text { char *bytes; size_t size, capacity; int failed; } text;

static void put(text *t, const char *bytes, size_t size) {
    if (t->failed) return;
    if (t->size + size > t->capacity) {
        size_t capacity = (t->size + size) * 2 + 4096;
        char *grown = (char *)realloc(t->bytes, capacity);
        if (!grown) {
            t->failed = 1;
            return;
        }
        t->bytes = grown;
        t->capacity = capacity;
    }
    memcpy(t->bytes + t->size, bytes, size);
    t->size += size;
}

static void put_text(text *t, const char *s) { put(t, s, strlen(s)); }

static void put_integer(text *t, int64_t value) {
    char digits[32];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    put_text(t, digits);
}

/* A JSON string; 0 if it is not UTF-8. */
static int put_string(text *t, const char *s) {
    size_t left = strlen(s), n;
    put_text(t, "\"");
    for (; left; s += n, left -= n) {
        char escaped[8];
        n = utf8_length((const unsigned char *)s, left);
        if (!n) return 0;
        if (*s == '"' || *s == '\\') {
            put_text(t, "\\");
            put(t, s, 1);
        } else if ((unsigned char)*s < 0x20) {
            snprintf(escaped, sizeof escaped, "\\u%04x", *s);
            put_text(t, escaped);
        } else {
            put(t, s, n);
        }
    }
    put_text(t, "\"");
    return 1;
}

static int put_header(text *t, const st_tensor *tensors, int64_t count, const st_pair *metadata,
                      int64_t metadata_count, st_error *error) {
    put(t, "\0\0\0\0\0\0\0\0{", 9);
    if (metadata_count) put_text(t, "\"__metadata__\":{");
    for (int64_t i = 0; i < metadata_count; i++) {
        if (i) put_text(t, ",");
        if (!put_string(t, metadata[i].key)) return fail(error, "a metadata key is not UTF-8");
        put_text(t, ":");
        if (!put_string(t, metadata[i].value)) return fail(error, "a metadata value is not UTF-8");
    }
    if (metadata_count) put_text(t, count ? "}," : "}");
    for (int64_t i = 0; i < count; i++) {
        if (i) put_text(t, ",");
        if (!put_string(t, tensors[i].name)) return fail(error, "a tensor's name is not UTF-8");
        put_text(t, ":{\"dtype\":");
        if (!put_string(t, tensors[i].dtype)) return fail(error, "a dtype is not UTF-8");
        put_text(t, ",\"shape\":[");
        for (int32_t d = 0; d < tensors[i].rank; d++) {
            if (d) put_text(t, ",");
            put_integer(t, tensors[i].shape[d]);
        }
        put_text(t, "],\"data_offsets\":[");
        put_integer(t, tensors[i].begin);
        put_text(t, ",");
        put_integer(t, tensors[i].begin + tensors[i].bytes);
        put_text(t, "]}");
    }
    put_text(t, "}");
    while (!t->failed && t->size % 8) put_text(t, " "); /* aligns the data */
    if (t->failed) return fail(error, "out of memory");
    if (t->size - 8 > HEADER_LIMIT) return fail(error, "the header would exceed %d bytes", HEADER_LIMIT);
    for (int i = 0; i < 8; i++) t->bytes[i] = (char)((uint64_t)(t->size - 8) >> (8 * i) & 255);
    return 1;
}

static int write_at(int descriptor, int64_t at, const void *data, int64_t bytes, st_error *error) {
    const char *p = (const char *)data;
    while (bytes > 0) {
        ssize_t n = pwrite(descriptor, p, bytes > (1 << 30) ? (size_t)1 << 30 : (size_t)bytes, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return fail(error, "cannot write: %s", strerror(n < 0 ? errno : ENOSPC));
        p += n;
        at += n;
        bytes -= n;
    }
    return 1;
}

/* Whether an open file begins with these bytes and has this size. */
static int begins_with(int descriptor, const text *header, int64_t size) {
    struct stat about;
    char piece[4096];
    size_t at = 0;
    if (fstat(descriptor, &about) || !S_ISREG(about.st_mode) || about.st_size != (off_t)size) return 0;
    while (at < header->size) {
        const size_t n = header->size - at < sizeof piece ? header->size - at : sizeof piece;
        if (pread(descriptor, piece, n, (off_t)at) != (ssize_t)n || memcmp(piece, header->bytes + at, n)) return 0;
        at += n;
    }
    return 1;
}

/* Reserves the file's blocks on the disk at once, where the system can. */
static int reserve(int descriptor, int64_t size, st_error *error) {
    if (ftruncate(descriptor, (off_t)size)) return fail(error, "cannot write: %s", strerror(errno));
#ifdef __linux__
    if (size && fallocate(descriptor, 0, 0, (off_t)size) && (errno == ENOSPC || errno == EFBIG || errno == EDQUOT))
        return fail(error, "cannot reserve %lld bytes: %s", (long long)size, strerror(errno));
#endif
    return 1;
}

/* Whether the open file is the one that an earlier run wrote. */
static int is_earlier(int descriptor, const st_resume *resume, const text *header, int64_t size) {
    const st_identity *e = resume->earlier;
    st_identity found;
    struct stat about;
    return identify(descriptor, &found, &about, NULL) && found.inode == e->inode &&
           begins_with(descriptor, header, size) &&
           (!resume->finished || (found.seconds == e->seconds && found.nanoseconds == e->nanoseconds));
}

/* Opens the file of an earlier run: the temporary file or, if it was finished, the one under the path. */
static void reopen(st_writer *writer, const st_resume *resume, const text *header, int64_t size) {
    writer->descriptor = open(writer->temporary, O_RDWR | O_NONBLOCK);
    writer->resumed = writer->descriptor >= 0 && is_earlier(writer->descriptor, resume, header, size);
    if (writer->descriptor >= 0 && !writer->resumed) {
        close(writer->descriptor);
        writer->descriptor = -1;
    }
    if (!writer->resumed && resume->finished) {
        const int done = open(writer->path, O_RDONLY | O_NONBLOCK);
        writer->resumed = done >= 0 && is_earlier(done, resume, header, size);
        if (done >= 0) close(done);
    }
}

int st_create_resumable(st_writer *writer, const char *path, const st_resume *resume, st_tensor *tensors, int64_t count,
                        const st_pair *metadata, int64_t metadata_count, st_error *error) {
    const char *temporary = resume ? resume->temporary : NULL;
    const st_tensor **names;
    text header = {NULL, 0, 0, 0};
    struct stat about;
    int ok;
    memset(writer, 0, sizeof *writer);
    writer->descriptor = -1;
    if (st_missing()) return fail(error, "%s", st_missing());
    /* No file replaces a folder: without this the commit would fail, after all bytes have been written. */
    if (!stat(path, &about) && S_ISDIR(about.st_mode)) return fail(error, "%.300s is a folder", path);
    for (int64_t i = 0; i < count; i++) {
        tensors[i].bits = st_dtype_bits(tensors[i].dtype);
        tensors[i].begin = writer->data_bytes;
        if (tensors[i].bits) tensors[i].bytes = tensor_bytes(&tensors[i]);
        if (tensors[i].bytes < 0 || tensors[i].bytes > INT64_MAX / 2 - writer->data_bytes)
            return fail(error, "tensor \"%.200s\" of %s has no bytes that fit 63 bits", tensors[i].name,
                        tensors[i].dtype);
        if (!strcmp(tensors[i].name, "__metadata__")) return fail(error, "a tensor cannot be named \"__metadata__\"");
        writer->data_bytes += tensors[i].bytes;
    }
    names = sort_names(tensors, count, error);
    if (!names) return 0;
    free(names);
    ok = put_header(&header, tensors, count, metadata, metadata_count, error);
    if (ok) {
        const size_t capacity = strlen(path) + (temporary ? strlen(temporary) : 0) + 32;
        const int64_t size = (int64_t)header.size + writer->data_bytes;
        writer->data_at = (int64_t)header.size;
        writer->path = (char *)malloc(capacity);
        writer->temporary = (char *)malloc(capacity);
        if (!writer->path || !writer->temporary) ok = fail(error, "out of memory");
        if (ok) {
            strcpy(writer->path, path);
            if (temporary) strcpy(writer->temporary, temporary);
            else snprintf(writer->temporary, capacity, "%s.%ld.tmp", path, (long)getpid());
        }
        writer->header = hash_bytes(HASH_BEGIN, header.bytes + 8, header.size - 8);
        if (ok && resume && resume->earlier) reopen(writer, resume, &header, size);
        if (ok && !writer->resumed) {
            if (temporary) unlink(writer->temporary);
            writer->descriptor = open(writer->temporary, O_RDWR | O_CREAT | O_EXCL, 0666);
            ok = writer->descriptor >= 0 || fail(error, "cannot create %.300s: %s", writer->temporary, strerror(errno));
            if (ok) ok = reserve(writer->descriptor, size, error);
            if (ok) ok = write_at(writer->descriptor, 0, header.bytes, (int64_t)header.size, error);
        }
    }
    free(header.bytes);
    if (!ok) st_abandon(writer);
    return ok;
}

int st_create(st_writer *writer, const char *path, st_tensor *tensors, int64_t count, const st_pair *metadata,
              int64_t metadata_count, st_error *error) {
    return st_create_resumable(writer, path, NULL, tensors, count, metadata, metadata_count, error);
}

int st_writer_identify(const st_writer *writer, st_identity *identity, st_error *error) {
    struct stat about;
    const int descriptor = writer->descriptor >= 0 ? writer->descriptor : open(writer->path, O_RDONLY | O_NONBLOCK);
    const int ok = descriptor >= 0 ? identify(descriptor, identity, &about, error)
                                   : fail(error, "cannot open it: %s", strerror(errno));
    if (descriptor >= 0 && writer->descriptor < 0) close(descriptor);
    identity->header = writer->header;
    return ok;
}

int st_handle_of(const st_writer *writer, st_handle *handle, st_error *error) {
    st_identity identity;
    memset(handle, 0, sizeof *handle);
    if (strlen(writer->temporary) >= sizeof handle->temporary) return fail(error, "the path is too long");
    if (!st_writer_identify(writer, &identity, error)) return 0;
    handle->data_at = writer->data_at;
    handle->data_bytes = writer->data_bytes;
    handle->inode = identity.inode;
    strcpy(handle->temporary, writer->temporary);
    return 1;
}

int st_join(st_writer *writer, const st_handle *handle, st_error *error) {
    st_identity found;
    struct stat about;
    memset(writer, 0, sizeof *writer);
    writer->data_at = handle->data_at;
    writer->data_bytes = handle->data_bytes;
    writer->descriptor = open(handle->temporary, O_RDWR | O_NONBLOCK);
    if (writer->descriptor < 0) return fail(error, "cannot open %.300s: %s", handle->temporary, strerror(errno));
    if (identify(writer->descriptor, &found, &about, error)) {
        if (found.inode == handle->inode && found.size == handle->data_at + handle->data_bytes) return 1;
        fail(error, "another program replaced %.300s", handle->temporary);
    }
    st_suspend(writer);
    return 0;
}

int st_write(st_writer *writer, int64_t at, const void *data, int64_t bytes, st_error *error) {
    int ok;
    if (at < 0 || bytes < 0 || at > writer->data_bytes || bytes > writer->data_bytes - at)
        return fail(error, "%lld bytes at %lld leave the data section of %lld bytes", (long long)bytes, (long long)at,
                    (long long)writer->data_bytes);
    if (writer->descriptor < 0) return 1;
    ok = write_at(writer->descriptor, writer->data_at + at, data, bytes, error);
#ifdef __linux__
    if (ok && bytes >= 1 << 20) /* starts writing to the disk while the next bytes are read */
        (void)sync_file_range(writer->descriptor, (off_t)(writer->data_at + at), (off_t)bytes, SYNC_FILE_RANGE_WRITE);
#endif
    return ok;
}

int st_flush(st_writer *writer, st_error *error) {
    return writer->descriptor < 0 || fsync(writer->descriptor) == 0 ||
           fail(error, "cannot write: %s", strerror(errno));
}

static void forget(st_writer *writer) {
    free(writer->path);
    free(writer->temporary);
    memset(writer, 0, sizeof *writer);
    writer->descriptor = -1;
}

int st_sync_folder(const char *path, st_error *error) {
    const size_t length = folder_length(path);
    char *folder = (char *)malloc(length + 2);
    int descriptor, ok;
    if (!folder) return fail(error, "out of memory");
    snprintf(folder, length + 2, "%.*s", length ? (int)length : 1, length ? path : ".");
    descriptor = open(folder, O_RDONLY);
    /* Some file systems cannot sync folders, and some folders may be written but not read: neither is an error. */
    ok = descriptor < 0 ? errno == EACCES : fsync(descriptor) == 0 || errno == EINVAL || errno == ENOTSUP;
    if (!ok) fail(error, "cannot bring the folder %.300s to the disk: %s", folder, strerror(errno));
    if (descriptor >= 0) close(descriptor);
    free(folder);
    return ok;
}

/* Whether the open file is the one under this name. */
static int stands_at(int descriptor, const char *path) {
    struct stat open_one, named;
    return !fstat(descriptor, &open_one) && !lstat(path, &named) && open_one.st_dev == named.st_dev &&
           open_one.st_ino == named.st_ino;
}

static void remove_temporary(const st_writer *writer) {
    if (stands_at(writer->descriptor, writer->temporary)) unlink(writer->temporary);
}

int st_commit(st_writer *writer, st_error *error) {
    int ok = 1;
    if (writer->descriptor >= 0) { /* while the file is open, its inode is not reused */
        if (fsync(writer->descriptor)) {
            ok = fail(error, "cannot finish %.300s: %s", writer->path, strerror(errno));
            remove_temporary(writer);
        } else if (!stands_at(writer->descriptor, writer->temporary)) {
            ok = fail(error, "cannot finish %.300s: another program removed or replaced %.300s", writer->path,
                      writer->temporary);
        } else if (rename(writer->temporary, writer->path)) {
            ok = fail(error, "cannot rename the complete %.300s to %.300s: %s", writer->temporary, writer->path,
                      strerror(errno));
        } else if (!stands_at(writer->descriptor, writer->path)) {
            ok = fail(error, "another program replaced %.300s as it was put in place", writer->path);
        }
        if (close(writer->descriptor) && ok)
            ok = fail(error, "%.300s is in place, but closing it failed: %s", writer->path, strerror(errno));
    }
    ok = ok && st_sync_folder(writer->path, error);
    forget(writer);
    return ok;
}

void st_suspend(st_writer *writer) {
    if (writer->descriptor >= 0) close(writer->descriptor);
    forget(writer);
}

void st_abandon(st_writer *writer) {
    if (writer->descriptor >= 0) {
        remove_temporary(writer);
        close(writer->descriptor);
    }
    forget(writer);
}

int st_write_index(const char *path, const char *const *files, const st_tensor *tensors, const int64_t *owner,
                   int64_t count, st_error *error) {
    const size_t capacity = strlen(path) + 32;
    char *temporary = (char *)malloc(capacity);
    text t = {NULL, 0, 0, 0};
    int64_t bytes = 0;
    int ok = temporary || fail(error, "out of memory"), descriptor;
    for (int64_t i = 0; i < count; i++) bytes += tensors[i].bytes;
    put_text(&t, "{\"metadata\":{\"total_size\":");
    put_integer(&t, bytes);
    put_text(&t, "},\"weight_map\":{");
    for (int64_t i = 0; ok && i < count; i++) {
        if (i) put_text(&t, ",");
        ok = put_string(&t, tensors[i].name) || fail(error, "a tensor's name is not UTF-8");
        put_text(&t, ":");
        ok = ok && (put_string(&t, files[owner[i]]) || fail(error, "a file's name is not UTF-8"));
    }
    put_text(&t, "}}\n");
    if (ok && t.failed) ok = fail(error, "out of memory");
    if (ok) {
        snprintf(temporary, capacity, "%s.%ld.tmp", path, (long)getpid());
        descriptor = open(temporary, O_WRONLY | O_CREAT | O_EXCL, 0666);
        ok = descriptor >= 0 || fail(error, "cannot create %.300s: %s", temporary, strerror(errno));
        if (ok) ok = write_at(descriptor, 0, t.bytes, (int64_t)t.size, error);
        if (ok && (fsync(descriptor) || rename(temporary, path)))
            ok = fail(error, "cannot finish %.300s: %s", path, strerror(errno));
        if (!ok && descriptor >= 0) unlink(temporary);
        if (descriptor >= 0 && close(descriptor) && ok)
            ok = fail(error, "cannot finish %.300s: %s", path, strerror(errno));
        ok = ok && st_sync_folder(path, error);
    }
    free(t.bytes);
    free(temporary);
    return ok;
}
