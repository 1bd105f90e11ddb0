/* progress.c - see progress.h.  SPDX-License-Identifier: MIT */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "progress.h"

#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

double progress_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

progress progress_begin(FILE *out, int64_t first, int64_t total, int quiet) {
    progress p;
    memset(&p, 0, sizeof p);
    p.out = out;
    p.terminal = !quiet && isatty(fileno(out));
    p.first = first;
    p.total = total;
    p.began = progress_seconds();
    return p;
}

static int columns(FILE *out) {
    struct winsize size;
    memset(&size, 0, sizeof size);
    return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

/* "59:59", "999:59:59"; the longest that is shown is 999:00:00. */
static void time_text(double seconds, char *text, size_t size) {
    const int s = (int)(seconds < 999 * 3600 ? seconds : 999 * 3600);
    if (s < 3600) snprintf(text, size, "%2d:%02d", s / 60, s % 60);
    else snprintf(text, size, "%d:%02d:%02d", s / 3600, s / 60 % 60, s % 60);
}

void progress_update(progress *p, int64_t done, const char *text) {
    enum { BAR = 20 };
    double now = progress_seconds(), share, left;
    int64_t span = p->total - p->first;
    int filled, capacity, shown = 0;
    char remaining[16], front[96];
    const char *end = text;
    if (!p->terminal || (now - p->drawn < 0.1 && done < p->total)) return;
    p->drawn = now;
    share = span > 0 ? (double)(done - p->first) / (double)span : 1.0;
    left = share > 0 ? (now - p->began) * (1 - share) / share : 0;
    time_text(left, remaining, sizeof remaining);
    filled = (int)(share * BAR + 0.5);
    snprintf(front, sizeof front, "[%.*s%.*s] %3d%% %s left  ", filled, "####################", BAR - filled,
             "....................", (int)(share * 100), remaining);
    capacity = columns(p->out) - 1 - (int)strlen(front); /* a line that wraps could not be rewritten */
    for (; *end && shown < capacity; end++) shown += ((unsigned char)end[1] & 0xC0) != 0x80; /* characters, not bytes */
    fprintf(p->out, "\r\033[K%s%.*s", front, (int)(end - text), text);
    fflush(p->out);
    p->shown = 1;
}

void progress_clear(progress *p) {
    if (p->shown) fprintf(p->out, "\r\033[K");
    p->shown = 0;
}
