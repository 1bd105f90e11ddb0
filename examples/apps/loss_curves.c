/* loss_curves.c - one chart of the held-out losses that runs of train_moe printed.
 * SPDX-License-Identifier: MIT
 *
 *     loss_curves OUT.svg NAME=LOG [NAME=LOG ...]     LOG: what a run printed; `make recipes` compares all recipes
 *
 * Prints the last held-out loss of each.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../common/svg.h"

enum { MOST_RUNS = 12 };
static const char *const colors[MOST_RUNS] = {"#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b",
                                              "#e377c2", "#7f7f7f", "#bcbd22", "#17becf", "#000000", "#aaaaaa"};

static int fail(const char *what, const char *why) {
    fprintf(stderr, "loss_curves: %s: %s\n", what, why);
    return 1;
}

typedef struct curve { double *steps, *losses; int count, capacity; } curve;

static void add_point(curve *c, double step, double loss) {
    if (c->count == c->capacity) {
        c->capacity = 2 * c->capacity + 256;
        c->steps = (double *)realloc(c->steps, (size_t)c->capacity * sizeof *c->steps);
        c->losses = (double *)realloc(c->losses, (size_t)c->capacity * sizeof *c->losses);
        if (!c->steps || !c->losses) exit(fail("the logs", "out of memory"));
    }
    c->steps[c->count] = step;
    c->losses[c->count++] = loss;
}

/* The steps and held-out losses of a log; 0 with errno where it cannot be read. */
static int read_log(const char *path, curve *c) {
    char line[512];
    FILE *in = fopen(path, "r");
    int failed;
    if (!in) return 0;
    while (fgets(line, sizeof line, in)) {
        const char *held_out = strstr(line, "held-out ");
        double step, loss;
        if (sscanf(line, "step %lf/", &step) == 1 && held_out && sscanf(held_out, "held-out %lf", &loss) == 1)
            add_point(c, step, loss);
    }
    failed = ferror(in); /* a folder, for example */
    fclose(in);
    return !failed;
}

int main(int argc, char **argv) {
    static curve curves[MOST_RUNS];
    static char labels[MOST_RUNS][64];
    svg_series series[MOST_RUNS];
    const svg_box box = {20, 10, 720, 380};
    FILE *out;
    int i;
    if (argc < 3 || argc - 2 > MOST_RUNS) return fail("usage", "loss_curves OUT.svg NAME=LOG ... (12 at most)");
    memset(series, 0, sizeof series);
    for (i = 0; i < argc - 2; i++) {
        const char *equals = strchr(argv[i + 2], '=');
        const curve *c = &curves[i];
        if (!equals) return fail(argv[i + 2], "is not NAME=LOG");
        snprintf(labels[i], sizeof labels[i], "%.*s", (int)(equals - argv[i + 2]), argv[i + 2]);
        if (strpbrk(labels[i], "&<>")) return fail(labels[i], "a name may not have &, < or >");
        if (!read_log(equals + 1, &curves[i])) return fail(equals + 1, strerror(errno));
        if (!c->count) return fail(equals + 1, "holds no held-out losses");
        snprintf(labels[i], sizeof labels[i], "%.*s %.3f", (int)(equals - argv[i + 2]), argv[i + 2],
                 c->losses[c->count - 1]);
        series[i].count = c->count;
        series[i].label = labels[i];
        series[i].color = colors[i];
        series[i].x = c->steps;
        series[i].y = c->losses;
        printf("%s\n", labels[i]);
    }
    out = fopen(argv[1], "w");
    if (!out) return fail(argv[1], "cannot be written");
    svg_begin(out, 760, 400);
    svg_lines(out, box, "Held-out loss by recipe", "step", "nats per byte", series, argc - 2);
    svg_end(out);
    if (fclose(out)) return fail(argv[1], "cannot be written");
    return 0;
}
