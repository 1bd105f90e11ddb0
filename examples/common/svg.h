/* svg.h - two kinds of charts in one SVG file.  SPDX-License-Identifier: MIT */
#ifndef EXAMPLES_COMMON_SVG_H
#define EXAMPLES_COMMON_SVG_H

#include <stdio.h>

typedef struct svg_box { double x, y, width, height; } svg_box;

typedef struct svg_series {
    const char *label, *color;
    int dashed, count;
    const double *x, *y;
} svg_series;

/* Labels must be free of the characters & < >. Values must be finite. The legend of svg_lines lies inside its frame. */
void svg_begin(FILE *out, double width, double height);
void svg_lines(FILE *out, svg_box box, const char *title, const char *x_label, const char *y_label,
               const svg_series *series, int count);

/* `groups` clusters of `count` bars each, values[group * count + bar]; a dashed line stands at `reference`. */
void svg_bars(FILE *out, svg_box box, const char *title, const char *group_label, const char *y_label,
              const double *values, int groups, int count, double reference);
void svg_end(FILE *out);

#endif
