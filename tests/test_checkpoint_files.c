/* test_checkpoint_files.c - the reader of safetensors files: rows 66 to 68, and
   the inputs that fuzzing kept. tests/checkpoint_files.py tests whole programs on files. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "test.h"

#include "fuzz/target.h"

#include <dirent.h>
#include <stdio.h>
#include <unistd.h>

static void need_cjson(void) {
    if (st_missing()) t_skip("no cJSON");
}

/* A file beside the tests' program, gone after the case unless it fails. */
static char *file_of(const char *name) {
    char *path = (char *)t_host(200);
    snprintf(path, 200, "/tmp/gmm-tests-%ld-%s", (long)getpid(), name);
    return path;
}

static void replay(int plan) { /* every kept input runs through, and some of them are accepted */
    const char *const folder = plan ? "tests/fuzz/plan" : "tests/fuzz/header";
    DIR *open = opendir(folder);
    struct dirent *entry;
    int count = 0, accepted = 0;
    need_cjson();
    T_CHECK(open != NULL, "%s is not there: run from the project's folder", folder);
    while ((entry = readdir(open)) != NULL) {
        char path[400];
        unsigned char *data = (unsigned char *)t_host(1 << 16);
        FILE *in;
        size_t n;
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        in = fopen(path, "rb");
        T_CHECK(in != NULL, "%s", path);
        n = fread(data, 1, 1 << 16, in);
        fclose(in);
        count++;
        accepted += plan ? fuzz_plan(data, n) : fuzz_header(data, n);
    }
    closedir(open);
    T_CHECK(count >= 10 && accepted >= 4 && accepted < count, "%d inputs, %d accepted", count, accepted);
}

static void header(int index) {
    static const struct { const char *what, *text; int64_t data; const char *needle; } cases[] = {
        {"right", "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, NULL},
        {"a gap", "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 3, "a gap"},
        {"an overlap", "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 3, "an overlap"},
        {"a key twice", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, "\"a\" twice"},
        {"an escaped key twice", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, "\"a\" twice"},
        {"an overflow", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296,2],\"data_offsets\":[0,2]}}", 2,
         "63-bit"},
        {"bytes behind", "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 9, "end at byte 2"},
        {"another size", "{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, "make 4"},
        {"half a byte", "{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, "no 63-bit"},
        {"no object", "[1,2]", 0, "no JSON object"},
        {"a trailing text", "{} {}", 0, "not valid JSON"},
        {"a leading zero", "{\"a\":{\"dtype\":\"U8\",\"shape\":[02],\"data_offsets\":[0,2]}}", 2, "leading zero"}};
    st_file file;
    st_error error;
    int ok;
    need_cjson();
    if (index < 0) {
        for (int64_t i = 0; i < T_COUNT(cases); i++) header((int)i);
        return;
    }
    ok = st_open_header(&file, cases[index].text, (int64_t)strlen(cases[index].text), cases[index].data, &error);
    if (ok) st_close(&file);
    T_CHECK(ok == !cases[index].needle, "%s: %s", cases[index].what, ok ? "accepted" : error.text);
    if (!ok) T_CHECK(strstr(error.text, cases[index].needle), "%s: \"%s\"", cases[index].what, error.text);
}

static void missing_shard(int arg) {
    char *path = file_of("x.safetensors.index.json");
    FILE *out = fopen(path, "w");
    st_set set;
    st_error error;
    int ok;
    (void)arg;
    need_cjson();
    T_CHECK(out != NULL, "%s", path);
    fputs("{\"weight_map\":{\"a\":\"gmm-no-such-shard.safetensors\"}}", out);
    fclose(out);
    ok = st_set_open(&set, path, &error);
    unlink(path);
    T_CHECK(!ok && strstr(error.text, "/tmp/gmm-no-such-shard.safetensors") && strstr(error.text, "cannot open"), "%s",
            error.text);
}

static void names(int arg) { /* quotes, backslashes, control characters, UTF-8; and through a resumed writer */
    static const char *const list[3] = {"a\"b\\c\n\t\x01", "\xC3\xA9\xF0\x9F\x98\x80", ""};
    char *path = file_of("names.safetensors"), *temporary = file_of("names.partial");
    st_tensor t[3];
    st_file file;
    st_writer w;
    st_error error;
    int ok, resumed = 0;
    (void)arg;
    need_cjson();
    memset(t, 0, sizeof t);
    for (int i = 0; i < 3; i++) {
        t[i].name = list[i];
        strcpy(t[i].dtype, "U8");
        t[i].rank = 1;
        t[i].shape[0] = i + 1;
    }
    ok = st_create_resumable(&w, path, temporary, 1, t, 3, NULL, 0, &error) && !w.resumed &&
         st_write(&w, 0, "xyy", 3, &error) && st_flush(&w, &error);
    st_suspend(&w);
    T_CHECK(ok && access(path, F_OK), "%s", error.text);
    ok = st_create_resumable(&w, path, temporary, 1, t, 3, NULL, 0, &error);
    resumed = ok && w.resumed;
    ok = ok && st_write(&w, 3, "zzz", 3, &error) && !st_write(&w, 4, "zzz", 3, &error) && st_commit(&w, &error);
    T_CHECK(ok && resumed && access(temporary, F_OK), "%s", error.text);
    ok = st_create_resumable(&w, path, temporary, 1, t, 3, NULL, 0, &error) && w.resumed && w.descriptor < 0 &&
         st_commit(&w, &error); /* it is finished already */
    T_CHECK(ok, "%s", error.text);
    ok = st_open(&file, path, &error);
    unlink(path);
    T_CHECK(ok, "%s", error.text);
    for (int i = 0; i < 3; i++) {
        const st_tensor *found = st_find(&file, list[i]);
        char got[4] = "";
        ok = ok && found && found->bytes == i + 1 && st_read(&file, found->begin, got, found->bytes, &error) &&
             got[0] == 'x' + i && !memcmp(got, file.data + found->begin, (size_t)found->bytes);
    }
    ok = ok && !st_read(&file, 5, temporary, 2, &error);
    st_close(&file);
    T_CHECK(ok, "names or bytes changed");
    t[1].name = t[0].name;
    T_CHECK(!st_create(&w, path, t, 3, NULL, 0, &error) && strstr(error.text, "twice"), "%s", error.text);
    t[1].name = "\xFF";
    T_CHECK(!st_create(&w, path, t, 3, NULL, 0, &error) && strstr(error.text, "UTF-8"), "%s", error.text);
}

void tests_checkpoint_files(void) {
    t_add_host(header, -1, "row66 headers that lie");
    t_add_host(replay, 0, "row66 kept inputs of the header fuzzer");
    t_add_host(replay, 1, "row66 kept inputs of the plan fuzzer");
    t_add_host(missing_shard, 0, "row67 index that names a missing shard");
    t_add_host(names, 0, "row68 names with escapes and UTF-8, resumed writer");
}
