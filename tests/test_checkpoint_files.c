/* test_checkpoint_files.c - the reader of safetensors files, and the corpus of the fuzzer.
   tests/checkpoint_files.py tests whole programs on files. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS, usleep */
#endif
#include "test.h"

#include "files.h"
#include "fuzz/gtp.h"
#include "fuzz/target.h"
#include "processes.h"

#include <dirent.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void need_cjson(void) {
    if (st_missing()) t_skip("no cJSON");
}

/* A temporary file next to the test program, removed after the case unless the case fails. */
static char *file_of(const char *name) {
    char *path = (char *)t_host(200);
    snprintf(path, 200, "/tmp/gmm-tests-%ld-%s", (long)getpid(), name);
    return path;
}

static void replay(int target) { /* every input of the corpus runs without a failure, and some are accepted */
    static const char *const folders[] = {"tests/fuzz/header", "tests/fuzz/plan", "tests/fuzz/gtp"};
    static int (*const run[])(const uint8_t *, size_t) = {fuzz_header, fuzz_plan, fuzz_gtp};
    const char *const folder = folders[target];
    DIR *open = opendir(folder);
    struct dirent *entry;
    int count = 0, accepted = 0;
    if (target < 2) need_cjson();
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
        accepted += run[target](data, n);
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

static void missing_shards(int arg) { /* st_set_open_partial notes missing files and opens the others */
    char *path = file_of("y.safetensors.index.json"), *there = file_of("there.safetensors");
    const char *name = strrchr(there, '/') + 1;
    FILE *out = fopen(path, "w");
    st_tensor t;
    st_writer w;
    st_set set;
    st_error error;
    int strict, ok;
    (void)arg;
    need_cjson();
    T_CHECK(out != NULL, "%s", path);
    fprintf(out, "{\"weight_map\":{\"a\":\"gmm-gone-1.safetensors\",\"b\":\"%s\",\"c\":\"gmm-gone-2.safetensors\","
                 "\"d\":\"gmm-gone-2.safetensors\"}}", name);
    fclose(out);
    memset(&t, 0, sizeof t);
    t.name = "b";
    strcpy(t.dtype, "U8");
    ok = st_create(&w, there, &t, 1, NULL, 0, &error) && st_write(&w, 0, "x", 1, &error) && st_commit(&w, &error);
    T_CHECK(ok, "%s", error.text);
    strict = st_set_open(&set, path, &error);
    T_CHECK(!strict && strstr(error.text, "/tmp/gmm-gone-1.safetensors") && strstr(error.text, "2 of the 3"), "%s",
            error.text);
    ok = st_set_open_partial(&set, path, &error);
    unlink(path);
    unlink(there);
    T_CHECK(ok, "%s", error.text);
    ok = set.count == 1 && set.missing_count == 2 && !strcmp(set.missing[0], "/tmp/gmm-gone-1.safetensors") &&
         !strcmp(set.missing[1], "/tmp/gmm-gone-2.safetensors") && st_find(&set.files[0], "b");
    st_set_close(&set);
    T_CHECK(ok, "the files of the index were sorted wrongly");
}

/* names with quotes, backslashes, control characters and UTF-8, also through a resumed writer */
static void names(int arg) {
    static const char *const list[3] = {"a\"b\\c\n\t\x01", "\xC3\xA9\xF0\x9F\x98\x80", ""};
    char *path = file_of("names.safetensors"), *temporary = file_of("names.partial");
    st_identity identity;
    st_resume resume = {temporary, NULL, 0};
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
    ok = st_create_resumable(&w, path, &resume, t, 3, NULL, 0, &error) && !w.resumed &&
         st_write(&w, 0, "xyy", 3, &error) && st_flush(&w, &error) && st_writer_identify(&w, &identity, &error);
    st_suspend(&w);
    T_CHECK(ok && access(path, F_OK), "%s", error.text);
    resume.earlier = &identity;
    ok = st_create_resumable(&w, path, &resume, t, 3, NULL, 0, &error);
    resumed = ok && w.resumed;
    ok = ok && st_write(&w, 3, "zzz", 3, &error) && !st_write(&w, 4, "zzz", 3, &error) && st_flush(&w, &error) &&
         st_writer_identify(&w, &identity, &error) && st_commit(&w, &error);
    T_CHECK(ok && resumed && access(temporary, F_OK), "%s", error.text);
    resume.finished = 1;
    ok = st_create_resumable(&w, path, &resume, t, 3, NULL, 0, &error) && w.resumed && w.descriptor < 0 &&
         st_commit(&w, &error); /* the file is already complete */
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

/* A complete file with other bytes and the same header is not mistaken for the one that a run wrote, whichever files
   were removed; a file of another program under the temporary name is not renamed. */
static void identities(int arg) {
    char *path = file_of("same.safetensors"), *temporary = file_of("same.partial"), *other = file_of("same.other");
    st_identity identity, earlier;
    st_resume resume = {temporary, NULL, 0};
    st_tensor t;
    st_file file;
    st_writer w;
    st_error error;
    struct stat about;
    FILE *out;
    char got = 0;
    int ok, resumed = 0;
    (void)arg;
    need_cjson();
    memset(&t, 0, sizeof t);
    t.name = "a";
    strcpy(t.dtype, "U8");
    ok = st_create(&w, path, &t, 1, NULL, 0, &error) && st_write(&w, 0, "o", 1, &error) && st_commit(&w, &error);
    T_CHECK(ok, "%s", error.text);
    for (int finished = 0; finished < 2; finished++) { /* the temporary file is removed, an older output exists */
        resume.earlier = NULL;
        ok = st_create_resumable(&w, path, &resume, &t, 1, NULL, 0, &error) && st_write(&w, 0, "n", 1, &error) &&
             st_flush(&w, &error) && st_writer_identify(&w, &identity, &error);
        T_CHECK(ok && link(temporary, other) == 0, "%s", error.text); /* so that its inode is not reused */
        st_suspend(&w);
        unlink(temporary);
        resume.earlier = &identity;
        resume.finished = finished;
        ok = st_create_resumable(&w, path, &resume, &t, 1, NULL, 0, &error);
        resumed |= ok && w.resumed;
        st_abandon(&w);
        unlink(other);
    }
    T_CHECK(ok && !resumed, "an older output was taken for a run's: %s", error.text);
    ok = st_open(&file, path, &error) && st_identify(&file, &identity, &error) && st_read(&file, 0, &got, 1, &error);
    st_close(&file);
    T_CHECK(ok && got == 'o' && !stat(path, &about), "%s", error.text);
    T_CHECK(identity.inode == (uint64_t)about.st_ino && identity.size == (int64_t)about.st_size, "not this file");
    earlier = identity;
    resume.earlier = &earlier;
    resume.finished = 1;
    ok = st_create_resumable(&w, path, &resume, &t, 1, NULL, 0, &error) && w.resumed && w.descriptor < 0;
    st_suspend(&w);
    T_CHECK(ok, "the file itself was not found");
    earlier.nanoseconds ^= 1; /* as if the inode had been reused */
    ok = st_create_resumable(&w, path, &resume, &t, 1, NULL, 0, &error);
    T_CHECK(ok && !w.resumed, "a file changed at another time was taken for a finished one");
    unlink(temporary);
    out = fopen(temporary, "w");
    T_CHECK(out && fputs("another program's", out) >= 0 && !fclose(out), "%s", temporary);
    ok = st_commit(&w, &error);
    T_CHECK(!ok && strstr(error.text, temporary) && strstr(error.text, "removed or replaced"), "%s", error.text);
    T_CHECK(!stat(temporary, &about) && about.st_size == 17, "the other program's file is gone");
    ok = st_open(&file, path, &error) && st_read(&file, 0, &got, 1, &error);
    st_close(&file);
    unlink(path);
    unlink(temporary);
    T_CHECK(ok && got == 'o', "the older file is gone");
}

/* A folder in the place of the output is refused at the start. One that appears during the work costs no byte. */
static void folders(int arg) {
    char *path = file_of("folder.safetensors");
    char temporary[300];
    st_tensor t;
    st_file file;
    st_writer w;
    st_error error;
    char got = 0;
    int ok;
    (void)arg;
    need_cjson();
    memset(&t, 0, sizeof t);
    t.name = "a";
    strcpy(t.dtype, "U8");
    T_CHECK(!mkdir(path, 0777), "%s", path);
    ok = st_create(&w, path, &t, 1, NULL, 0, &error);
    T_CHECK(!ok && strstr(error.text, path) && strstr(error.text, "is a folder"), "%s", ok ? "created" : error.text);
    T_CHECK(!rmdir(path), "%s", path);
    ok = st_create(&w, path, &t, 1, NULL, 0, &error) && st_write(&w, 0, "x", 1, &error);
    T_CHECK(ok, "%s", error.text);
    snprintf(temporary, sizeof temporary, "%s", w.temporary);
    T_CHECK(!mkdir(path, 0777), "%s", path);
    ok = st_commit(&w, &error);
    rmdir(path);
    T_CHECK(!ok && strstr(error.text, temporary), "%s", ok ? "committed" : error.text);
    ok = st_open(&file, temporary, &error) && st_read(&file, 0, &got, 1, &error);
    st_close(&file);
    unlink(temporary);
    T_CHECK(ok && got == 'x', "the bytes are lost: %s", error.text);
}

/* Three processes write one file, each its bytes, as ranks do; what is not that file is refused. */
static void joined(int arg) {
    char *path = file_of("joined.safetensors");
    st_handle *handle = (st_handle *)t_host(sizeof *handle);
    st_tensor t;
    st_file file;
    st_writer w, mine;
    st_error error;
    char got[3] = "", kept[4200];
    int ok, status = 0;
    (void)arg;
    need_cjson();
    memset(&t, 0, sizeof t);
    t.name = "a";
    strcpy(t.dtype, "U8");
    t.rank = 1;
    t.shape[0] = 3;
    ok = st_create(&w, path, &t, 1, NULL, 0, &error) && st_handle_of(&w, handle, &error) &&
         st_write(&w, 0, "x", 1, &error);
    T_CHECK(ok, "%s", error.text);
    for (int i = 1; i < 3; i++) {
        const pid_t child = fork();
        if (!child) {
            memset(&w, 0xAB, sizeof w); /* another process has no writer at this address */
            ok = st_join(&mine, handle, &error) && st_write(&mine, i, &"xyz"[i], 1, &error) &&
                 !st_write(&mine, 3, "x", 1, &error);
            if (ok) st_suspend(&mine);
            _exit(ok ? 7 : 1);
        }
        T_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7, "writer %d", i);
    }
    snprintf(kept, sizeof kept, "%s.kept", handle->temporary);
    T_CHECK(!rename(handle->temporary, kept), "%s", kept);
    ok = st_join(&mine, handle, &error);
    T_CHECK(!ok && strstr(error.text, "cannot open") && strstr(error.text, handle->temporary), "%s", error.text);
    {
        FILE *other = fopen(handle->temporary, "w");
        T_CHECK(other && !ftruncate(fileno(other), (off_t)(handle->data_at + handle->data_bytes)) && !fclose(other),
                "%s", handle->temporary);
    }
    ok = st_join(&mine, handle, &error);
    T_CHECK(!ok && strstr(error.text, "replaced"), "%s", ok ? "another file was joined" : error.text);
    T_CHECK(!rename(kept, handle->temporary), "%s", kept);
    ok = st_commit(&w, &error) && st_open(&file, path, &error) && st_read(&file, 0, got, 3, &error);
    if (ok) st_close(&file);
    unlink(path);
    T_CHECK(ok && !memcmp(got, "xyz", 3), "bytes %.3s: %s", got, error.text);
}

/* only one of two processes holds the lock; it is released when its process ends or gives it back */
static void locks(int arg) {
    char *path = file_of("lock");
    file_lock lock;
    file_error error;
    int status = 0;
    pid_t child;
    (void)arg;
    T_CHECK(file_lock_take(&lock, path, &error), "%s", error.text);
    if (!lock.held) t_skip("no locks here");
    for (int held = 1; held >= 0; held--) {
        if (!held) file_lock_release(&lock);
        child = fork();
        if (!child) {
            file_lock mine;
            const int taken = file_lock_take(&mine, path, &error);
            _exit(taken ? 1 : strstr(error.text, path) && strstr(error.text, "process") ? 2 : 3);
        }
        T_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status), "no child");
        T_CHECK(WEXITSTATUS(status) == (held ? 2 : 1), "held %d: %d", held, WEXITSTATUS(status));
    }
    T_CHECK(!access(path, F_OK), "the child left its file");
    T_CHECK(file_lock_take(&lock, path, &error), "%s", error.text); /* the lock file of a process that has ended */
    file_lock_release(&lock);
    T_CHECK(access(path, F_OK), "the lock file is still there");
}

/* What processes of processes_begin do: each counts in `ready`, and in `ended` if it ends as it shall. */
typedef struct group { volatile int ready[2], ended[2]; } group;

enum { ENDS, FAILS, STOPS };
static void processes_run(group *g, int what) {
    int code = 1;
    const int me = processes_begin(2, &code);
    (void)alarm(20); /* a test that fails leaves no process */
    if (me < 0) _exit(me == -1 ? code : 99);
    g->ready[me] = 1;
    while (what == STOPS && !stop_signal) (void)usleep(1000);
    (void)usleep(200000); /* as a step and saving last; meanwhile another signal may come */
    while (what == FAILS && me == 0) (void)pause();
    g->ended[me] = 1;
    _exit(what == STOPS ? stop_code() : what == FAILS);
}

/* Processes end together: all have ended, one has failed, and they were asked to stop by a signal to the first process
   or to the whole group. None of that depends on what became of SIGCHLD before. */
static void processes(int arg) {
    static const struct { const char *what; int run, number, whole, code, ended; } cases[] = {
        {"all end", ENDS, 0, 0, 0, 2}, {"one fails", FAILS, 0, 0, 1, 1},
        {"SIGTERM to the first", STOPS, SIGTERM, 0, 128 + SIGTERM, 2},
        {"SIGINT to the first", STOPS, SIGINT, 0, 128 + SIGINT, 2},
        {"SIGTERM to all", STOPS, SIGTERM, 1, 128 + SIGTERM, 2},
        {"SIGINT to all", STOPS, SIGINT, 1, 128 + SIGINT, 2}};
    (void)arg;
    for (int64_t i = 0; i < 2 * T_COUNT(cases); i++) {
        const int k = (int)(i / 2);
        group *g = (group *)mmap(NULL, sizeof *g, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        int status = 0, wait_ms = 0;
        pid_t child;
        T_CHECK(g != MAP_FAILED, "no memory");
        child = fork();
        if (!child) {
            (void)setpgid(0, 0);
            (void)signal(SIGCHLD, i % 2 ? SIG_IGN : SIG_DFL);
            (void)alarm(20);
            stop_catch(1, SA_RESTART);
            processes_run(g, cases[k].run);
        }
        while (!(g->ready[0] && g->ready[1]) && wait_ms++ < 10000) (void)usleep(1000);
        (void)usleep(20000); /* until the first process waits */
        if (cases[k].number) T_CHECK(!kill(cases[k].whole ? -child : child, cases[k].number), "no process");
        T_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == cases[k].code,
                "%s: status %#x", cases[k].what, (unsigned)status);
        T_CHECK(g->ended[0] + g->ended[1] == cases[k].ended, "%s: %d ended", cases[k].what, g->ended[0] + g->ended[1]);
        (void)munmap(g, sizeof *g);
    }
}

static void places(int arg) { /* one file by several paths, existing or not */
    char *a = file_of("a"), *hard = file_of("hard"), *soft = file_of("soft"), *folder = file_of("link");
    const char *const name = strrchr(a, '/') + 1;
    char through[400], absent[400], absent_through[400];
    FILE *out = fopen(a, "w");
    file_place p[8];
    (void)arg;
    T_CHECK(out && !fclose(out) && !link(a, hard) && !symlink(name, soft) && !symlink("/tmp", folder), "%s", a);
    snprintf(through, sizeof through, "%s/../tmp/./%s", folder, name);
    snprintf(absent, sizeof absent, "%s.absent", a);
    snprintf(absent_through, sizeof absent_through, "%s/%s.absent", folder, name);
    {
        const char *const paths[8] = {a, hard, soft, through, absent, absent_through, "/tmp", folder};
        for (int i = 0; i < 8; i++) T_CHECK(file_place_of(&p[i], paths[i]), "no memory");
    }
    unlink(soft);
    unlink(hard);
    unlink(folder);
    unlink(a);
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 8; k++) {
            static const int kind[8] = {0, 0, 0, 0, 1, 1, 2, 2};
            T_CHECK(file_place_same(&p[i], &p[k]) == (kind[i] == kind[k]), "paths %d and %d", i, k);
        }
    for (int i = 0; i < 8; i++) file_place_free(&p[i]);
}

void tests_checkpoint_files(void) {
    t_add_host(header, -1, "checkpoint files headers that lie");
    t_add_host(replay, 0, "checkpoint files kept inputs of the header fuzzer");
    t_add_host(replay, 1, "checkpoint files kept inputs of the plan fuzzer");
    t_add_host(replay, 2, "checkpoint files kept inputs of the GTP fuzzer");
    t_add_host(missing_shard, 0, "checkpoint files index that names a missing shard");
    t_add_host(missing_shards, 0, "checkpoint files index with missing shards opened in part");
    t_add_host(names, 0, "checkpoint files names with escapes and UTF-8, resumed writer");
    t_add_host(identities, 0, "checkpoint files older files are not taken for the output of a run");
    t_add_host(folders, 0, "checkpoint files folder in the place of an output");
    t_add_host(joined, 0, "checkpoint files one file by three processes");
    t_add_host(locks, 0, "checkpoint files lock of an output between two processes");
    t_add_host(processes, 0, "checkpoint files processes that end together");
    t_add_host(places, 0, "checkpoint files one file by many paths");
}
