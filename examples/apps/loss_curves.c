/* loss_curves.c - one chart of the held-out losses that runs of train_moe printed.
 * SPDX-License-Identifier: MIT
 *
 *     loss_curves OUT.svg NAME=LOG [NAME=LOG ...]     LOG: what a run printed; `make recipes` compares all recipes
 *
 * Prints the last held-out loss of each.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../common/svg.h"

enum { MOST_RUNS = 12, MOST_POINTS = 4096 };
static const char *const colors[MOST_RUNS] = {"#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b",
                                              "#e377c2", "#7f7f7f", "#bcbd22", "#17becf", "#000000", "#aaaaaa"};

static int fail(const char *what, const char *why) {
    fprintf(stderr, "loss_curves: %s: %s\n", what, why);
    return 1;
}

/* The steps and held-out losses of a log; how many. */
static int read_log(const char *path, double *steps, double *losses) {
    char line[512];
    FILE *in = fopen(path, "r");
    int n = 0;
    if (!in) return -1;
    while (n < MOST_POINTS && fgets(line, sizeof line, in)) {
        const char *held_out = strstr(line, "held-out ");
        if (sscanf(line, "step %lf/", &steps[n]) == 1 && held_out && sscanf(held_out, "held-out %lf", &losses[n]) == 1)
            n++;
    }
    fclose(in);
    return n;
}

int main(int argc, char **argv) {
    static double steps[MOST_RUNS][MOST_POINTS], losses[MOST_RUNS][MOST_POINTS];
    static char labels[MOST_RUNS][64];
    svg_series series[MOST_RUNS];
    const svg_box box = {20, 10, 720, 380};
    FILE *out;
    int i;
    if (argc < 3 || argc - 2 > MOST_RUNS) return fail("usage", "loss_curves OUT.svg NAME=LOG ... (12 at most)");
    memset(series, 0, sizeof series);
    for (i = 0; i < argc - 2; i++) {
        const char *equals = strchr(argv[i + 2], '=');
        if (!equals) return fail(argv[i + 2], "is not NAME=LOG");
        series[i].count = read_log(equals + 1, steps[i], losses[i]);
        if (series[i].count < 1) return fail(equals + 1, "holds no held-out losses");
        snprintf(labels[i], sizeof labels[i], "%.*s %.3f", (int)(equals - argv[i + 2]), argv[i + 2],
                 losses[i][series[i].count - 1]);
        series[i].label = labels[i];
        series[i].color = colors[i];
        series[i].x = steps[i];
        series[i].y = losses[i];
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
