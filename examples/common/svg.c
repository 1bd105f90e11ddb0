/* svg.c - see svg.h.  SPDX-License-Identifier: MIT */
#include "svg.h"

#include <math.h>

typedef struct frame { svg_box inner; double x0, x1, y0, y1; } frame;

#define DASHES " stroke-dasharray=\"6 4\""

static const char *palette[] = {"#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377"};

void svg_begin(FILE *out, double width, double height) {
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 %g %g\" "
                 "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" "
                 "fill=\"white\"/>\n", width, height, width, height);
}

void svg_end(FILE *out) { fprintf(out, "</svg>\n"); }

/* A round number of units that divides the span into four to eight steps. */
static double tick_step(double span) {
    double step = pow(10, floor(log10(span / 4)));
    return span / step > 20 ? step * 5 : span / step > 8 ? step * 2 : step;
}

static double map_x(const frame *f, double x) {
    return f->inner.x + (x - f->x0) / (f->x1 - f->x0) * f->inner.width;
}

static double map_y(const frame *f, double y) {
    return f->inner.y + f->inner.height - (y - f->y0) / (f->y1 - f->y0) * f->inner.height;
}

/* Characters of UTF-8. */
static int characters(const char *s) {
    int n = 0;
    for (; *s; s++) n += ((unsigned char)*s & 0xC0) != 0x80;
    return n;
}

static void text(FILE *out, double x, double y, const char *anchor, const char *s) {
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor, s);
}

static void draw_frame(FILE *out, const frame *f, svg_box box, const char *title, const char *x_label,
                       const char *y_label) {
    double step = tick_step(f->y1 - f->y0);
    char label[32];
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" font-size=\"15\">%s</text>\n", f->inner.x, box.y + 20, title);
    for (double y = ceil(f->y0 / step - 1e-9) * step; y <= f->y1 + step * 1e-9; y += step) {
        fprintf(out, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#dddddd\"/>\n", f->inner.x,
                f->inner.x + f->inner.width, map_y(f, y), map_y(f, y));
        snprintf(label, sizeof label, "%g", fabs(y) < step * 1e-9 ? 0.0 : y);
        text(out, f->inner.x - 6, map_y(f, y) + 4, "end", label);
    }
    text(out, f->inner.x + f->inner.width / 2, box.y + box.height - 6, "middle", x_label);
    fprintf(out, "<text transform=\"translate(%.1f %.1f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n", box.x + 14,
            f->inner.y + f->inner.height / 2, y_label);
    fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"none\" stroke=\"#888888\"/>\n",
            f->inner.x, f->inner.y, f->inner.width, f->inner.height);
}

static svg_box inside(svg_box box) {
    svg_box inner;
    inner.x = box.x + 60;
    inner.y = box.y + 32;
    inner.width = box.width - 80;
    inner.height = box.height - 76;
    return inner;
}

/* Draws the legend in the upper right corner of the frame, with a background. Text widths are estimated here,
   independent of the viewer's font, and the text shrinks if the frame is too narrow. */
static void draw_legend(FILE *out, const frame *f, const svg_series *series, int count) {
    const double line = 18, stroke = 30, gap = 8, most = f->inner.width - stroke - 4 * gap;
    double x = 0, y = f->inner.y + gap, width = 0;
    int shown = 0;
    for (int s = 0; s < count; s++) {
        const double wide = 6.6 * characters(series[s].label);
        if (!series[s].count) continue;
        width = wide > width ? wide : width;
        shown++;
    }
    if (!shown) return;
    width = width > most ? most : width;
    x = f->inner.x + f->inner.width - width - stroke - 3 * gap;
    fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"white\" fill-opacity=\"0.8\"/>\n",
            x, y, width + stroke + 2 * gap, line * shown + gap / 2);
    for (int s = 0; s < count; s++) {
        const double wide = 6.6 * characters(series[s].label);
        if (!series[s].count) continue;
        fprintf(out, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" stroke-width=\"2\"%s/>\n",
                x + gap / 2, x + gap / 2 + stroke, y + line / 2, y + line / 2, series[s].color,
                series[s].dashed ? DASHES : "");
        fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" textLength=\"%.1f\" lengthAdjust=\"spacingAndGlyphs\">%s</text>\n",
                x + stroke + gap * 1.5, y + line / 2 + 4, wide > width ? width : wide, series[s].label);
        y += line;
    }
}

void svg_lines(FILE *out, svg_box box, const char *title, const char *x_label, const char *y_label,
               const svg_series *series, int count) {
    frame f;
    double step;
    char label[32];
    int any = 0;
    f.inner = inside(box);
    f.x0 = f.y0 = 0;
    f.x1 = f.y1 = 1;
    for (int s = 0; s < count; s++)
        for (int i = 0; i < series[s].count; i++) {
            double x = series[s].x[i], y = series[s].y[i];
            f.x0 = !any || x < f.x0 ? x : f.x0;
            f.x1 = !any || x > f.x1 ? x : f.x1;
            f.y0 = !any || y < f.y0 ? y : f.y0;
            f.y1 = !any || y > f.y1 ? y : f.y1;
            any = 1;
        }
    if (f.x1 <= f.x0) f.x1 = f.x0 + 1;
    if (f.y1 <= f.y0) f.y1 = f.y0 + 1;
    f.y1 += (f.y1 - f.y0) * 0.05;
    f.y0 -= (f.y1 - f.y0) * 0.05;
    draw_frame(out, &f, box, title, x_label, y_label);
    step = tick_step(f.x1 - f.x0);
    for (double x = ceil(f.x0 / step - 1e-9) * step; x <= f.x1 + step * 1e-9; x += step) {
        snprintf(label, sizeof label, "%g", fabs(x) < step * 1e-9 ? 0.0 : x);
        text(out, map_x(&f, x), f.inner.y + f.inner.height + 18, "middle", label);
    }
    for (int s = 0; s < count; s++) {
        if (!series[s].count) continue;
        fprintf(out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s points=\"", series[s].color,
                series[s].dashed ? DASHES : "");
        for (int i = 0; i < series[s].count; i++)
            fprintf(out, "%.1f,%.1f ", map_x(&f, series[s].x[i]), map_y(&f, series[s].y[i]));
        fprintf(out, "\"/>\n");
    }
    draw_legend(out, &f, series, count);
}

void svg_bars(FILE *out, svg_box box, const char *title, const char *group_label, const char *y_label,
              const double *values, int groups, int count, double reference) {
    frame f;
    double slot, bar;
    char label[64];
    f.inner = inside(box);
    f.x0 = 0;
    f.x1 = groups;
    f.y0 = 0;
    f.y1 = reference;
    for (int i = 0; i < groups * count; i++) f.y1 = values[i] > f.y1 ? values[i] : f.y1;
    f.y1 = f.y1 > 0 ? f.y1 * 1.08 : 1;
    draw_frame(out, &f, box, title, "", y_label);
    slot = f.inner.width / groups;
    bar = slot * 0.9 / count;
    for (int g = 0; g < groups; g++) {
        for (int i = 0; i < count; i++) {
            double y = map_y(&f, values[g * count + i]);
            fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"><title>%s %d, %d: %.4g"
                         "</title></rect>\n", f.inner.x + g * slot + slot * 0.05 + i * bar, y, bar * 0.9,
                    f.inner.y + f.inner.height - y, palette[g % 6], group_label, g, i, values[g * count + i]);
        }
        snprintf(label, sizeof label, "%s %d", group_label, g);
        text(out, f.inner.x + (g + 0.5) * slot, f.inner.y + f.inner.height + 18, "middle", label);
    }
    fprintf(out, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#333333\" stroke-dasharray=\"6 4\"/>"
                 "\n",
            f.inner.x, f.inner.x + f.inner.width, map_y(&f, reference), map_y(&f, reference));
}
