/* .................................................................. Copies as operands of 16-bit products ... */

/* Dequantizes MX32 and NV16 copies into matrices of 16-bit elements, code times scale, for the 16-bit Hopper
   products. The values equal those that mma/quantized.cuh computes in shared memory. Copies whose lines run along the
   contraction, and columnwise MX32, keep their layout: rows of `dst` are rows of the copy, without gaps. Columnwise
   NV16 tokens are transposed, since the operands of wgrad are [k][lines]: rows of `dst` are tokens. The groups
   follow one another, each padded to a multiple of 16 rows. Padding rows are zero, but for Hadamard-transformed copies,
   whose transform spreads values of the group over them. */
typedef struct gmm_expand_operand {
    gmm_mat src;        /* tables in device memory; dtype GMM_NONE: absent */
    uint16_t *dst;
    gmm_direction direction;
    int32_t grouped;    /* the matrix holds tokens of all groups, else one matrix per group */
    int32_t rows, cols; /* of each quantized matrix; for tokens rows is the capacity */
} gmm_expand_operand;

typedef struct gmm_expand_args {
    gmm_expand_operand operand[2];
    gmm_dtype dtype;
    int32_t groups;
    const int64_t *offsets; /* [G + 1] */
    const int32_t *tiles;   /* [G + 1] prefix sums of tiles of GMM_GROUP_ROWS rows */
    const int32_t *blocks16; /* [G + 1] prefix sums of blocks of 16 rows; transposed copies */
    int64_t *ends;          /* [G + 1] receives 16 times blocks16: row offsets of groups in transposed copies, or is
                               NULL */
    const float *alpha;     /* [G] or [1]; NULL: 1 */
    int32_t alpha_per_group;
    float *factor;          /* [2][G] receives what each group's accumulators are multiplied by, and what the result is
                               multiplied by after that (gmm__scale_split); NULL: not written */
} gmm_expand_args;

enum {
    GMM_EXPAND_THREADS = 256,
    GMM_EXPAND_MAX_THREADS = 1024, /* threads of a CTA that has a multiprocessor to itself */
    GMM_EXPAND_LINES = 4,          /* lines that a warp dequantizes together, 256 elements of each at a time */
    GMM_EXPAND_SPAN = 1024,        /* elements of each line in a task */
    GMM_EXPAND_TRANSPOSE_THREADS = 256,
    /* strips of GMM_GROUP_ROWS rows that a CTA transposes, 64 lines at a time, so that 128 bytes are contiguous in
       loads and stores */
    GMM_EXPAND_STRIPS = 2,
    GMM_EXPAND_STRIP_LINES = 128   /* lines in a task */
};

/* Loads eight codes, the first in the lowest bits. `aligned`: by vector loads. */
GMM__DEVICE uint2 gmm_expand_load8(int fp4, const uint8_t *src, int aligned) {
    uint2 v = make_uint2(0u, 0u);
    int i;
    if (aligned) {
        if (fp4) v.x = __ldcs((const unsigned *)(const void *)src);
        else v = __ldcs((const uint2 *)(const void *)src);
        return v;
    }
#pragma unroll 1
    for (i = fp4 ? 3 : 7; i >= 0; i--) {
        v.y = __funnelshift_l(v.x, v.y, 8);
        v.x = v.x << 8 | src[i];
    }
    return v;
}

/* Converts eight codes to 16-bit elements, two per word. */
GMM__DEVICE void gmm_expand_convert8(gmm_dtype dtype, gmm_dtype format, int fp4, uint2 codes, uint32_t dst[4]) {
    if (fp4) gmm_fp4_to_16bit_x8(dtype, codes.x, dst);
    else {
        gmm_fp8_to_16bit_x4(dtype, format, codes.x, dst);
        gmm_fp8_to_16bit_x4(dtype, format, codes.y, dst + 2);
    }
}

/* Converts four scale bytes to 16-bit elements, two per word. The E8M0 bytes of MX32 are exponents of bf16. */
GMM__DEVICE void gmm_expand_scales(gmm_dtype dtype, gmm_scaling scaling, uint32_t bytes, uint32_t dst[2]) {
    const uint32_t magnitude = bytes & 0x7F7F7F7Fu;
    const uint32_t zero = ~((magnitude + 0x7F7F7F7Fu) | bytes) & 0x80808080u;
    const uint32_t nan = (magnitude + 0x01010101u) & bytes & 0x80808080u;
    int i;
    if (scaling == GMM_SCALING_NV16) {
        gmm_fp8_to_16bit_x4(dtype, GMM_E4M3, bytes, dst);
        return;
    }
    dst[0] = gmm_prmt(bytes, 0u, 0x4140u) << 7;
    dst[1] = gmm_prmt(bytes, 0u, 0x4342u) << 7;
    if (zero | nan)
#pragma unroll
        for (i = 0; i < 2; i++) /* 2^-127 is subnormal, NaN is 0x7FFF */
            dst[i] |= (gmm_prmt(zero, 0u, i ? 0xBBAAu : 0x9988u) & 0x00400040u) |
                     (gmm_prmt(nan, 0u, i ? 0xBBAAu : 0x9988u) & 0x007F007Fu);
}

/* Registers of a lane for one step: eight codes of each line, and a scale byte of each line or, for columnwise MX32,
   whose scales apply to blocks of lines, eight bytes for eight columns. */
typedef struct gmm_expand_step {
    uint2 codes[GMM_EXPAND_LINES];
    uint32_t scale[GMM_EXPAND_LINES];
} gmm_expand_step;

/* Addresses and strides of a warp's lines. */
typedef struct gmm_expand_lines_view {
    const uint8_t *data, *scale;
    int64_t pitch;
    /* bytes of scales: between lines (mn_major and swizzled: between 128 lines), and between groups of four blocks */
    int32_t line_stride, block4_stride;
    int32_t count, aligned, swizzled;
} gmm_expand_lines_view;

GMM__DEVICE void gmm_expand_load_step(const gmm_expand_lines_view *p, int mx, int fp4, int mn_major, int32_t c,
                                      gmm_expand_step *step) {
    const int32_t block = c / (mx ? 32 : 16);
    int i;
#pragma unroll
    for (i = 0; i < GMM_EXPAND_LINES; i++) {
        step->codes[i] = make_uint2(0u, 0u);
        step->scale[i] = 0u;
        if (i < p->count && p->aligned)
            step->codes[i] = gmm_expand_load8(fp4, p->data + i * p->pitch + c / (fp4 ? 2 : 1), 1);
        if (i < p->count && !mn_major)
            step->scale[i] = p->scale[i * p->line_stride + (block >> 2) * (int64_t)p->block4_stride + (block & 3)];
    }
    if (!p->aligned)
#pragma unroll
        for (i = 0; i < GMM_EXPAND_LINES; i++)
            if (i < p->count)
                step->codes[i] = gmm_expand_load8(fp4, p->data + i * p->pitch + c / (fp4 ? 2 : 1), 0);
    if (mn_major && !p->swizzled) {
        const uint2 bytes = gmm_expand_load8(0, p->scale + c, p->aligned);
        step->scale[0] = bytes.x;
        step->scale[1] = bytes.y;
    } else if (mn_major) {
        const uint8_t *src = p->scale + c / 128 * (int64_t)p->line_stride + c % 32 * 16 + c % 128 / 32 * 4;
#pragma unroll
        for (i = 0; i < 8; i++) step->scale[i / 4] |= (uint32_t)src[16 * i] << (8 * (i % 4));
    }
}

/* A conversion: dtype of the result, MX32 or NV16, FP4 or FP8 codes. mn_major: columnwise MX32, whose codes lie in rows
   of the matrix; these rows are the lines that are dequantized, and a block of 32 is spread over 32 of them. */
typedef struct gmm_expand_format {
    gmm_dtype dtype;
    int mx, fp4, mn_major;
} gmm_expand_format;

/* Dequantizes lines [line, line + GMM_EXPAND_LINES) of group or matrix g, elements [c, c + GMM_EXPAND_SPAN) of them.
   One warp. The format is a compile-time constant of each call. */
GMM__DEVICE void gmm_expand_lines(const gmm_expand_args *args, const gmm_expand_operand *s,
                                  const gmm_expand_format format, int32_t g, int32_t line, int32_t c) {
    const gmm_dtype dtype = format.dtype;
    const int mx = format.mx, fp4 = format.fp4, mn_major = format.mn_major;
    const int transposed = !mx && s->direction == GMM_COLUMNWISE; /* lines are columns of the matrix */
    const int32_t width = transposed ? s->rows : s->cols;
    const int32_t end = width - c < GMM_EXPAND_SPAN ? width : c + GMM_EXPAND_SPAN;
    int64_t row = 0, start = 0, rows = s->rows;
    gmm_expand_lines_view view;
    gmm_mat copy = s->src;
    gmm__qview v;
    uint16_t *dst;
    int i, j;
    copy.scaling = mx ? GMM_SCALING_MX32 : GMM_SCALING_NV16;
    if (s->grouped) {
        row = args->offsets[g];
        rows = args->offsets[g + 1] - row;
        start = (int64_t)args->tiles[g] * GMM_GROUP_ROWS;
    }
    view.count = (int32_t)(transposed ? s->cols : rows) - line;
    if (view.count <= 0) return;
    v = gmm__qview_of(&copy, mn_major ? GMM_COLUMNWISE : mx ? GMM_ROWWISE : s->direction, s->grouped, g, row, start,
                      rows, s->cols);
    view.pitch = v.ld / (fp4 ? 2 : 1);
    view.data = v.data + line * view.pitch;
    view.scale = v.scale + (mn_major ? gmm__qview_scale(&v, 0, line / 32) : gmm__qview_scale(&v, line, 0));
    view.swizzled = copy.scale_order == GMM_SCALES_SWIZZLED;
    view.line_stride = (int32_t)gmm__qview_scale(&v, mn_major && view.swizzled ? 128 : 1, 0);
    view.block4_stride = gmm_qgemm_scale_strides_of(&copy, 0, v.lines).block4;
    view.aligned = (((uintptr_t)view.data | (uintptr_t)view.pitch | (mn_major ? (uintptr_t)view.scale : 0)) & 7) == 0;
    dst = s->dst + ((s->grouped ? row : (int64_t)g * (transposed ? s->cols : s->rows)) + line) * width;
#pragma unroll 1
    for (c += 8 * (int32_t)(threadIdx.x & 31u); c < end; c += 256) {
        gmm_expand_step step;
        uint32_t scales[4];
        gmm_expand_load_step(&view, mx, fp4, mn_major, c, &step);
        if (mn_major) {
            gmm_expand_scales(dtype, copy.scaling, step.scale[0], scales);
            gmm_expand_scales(dtype, copy.scaling, step.scale[1], scales + 2);
        } else {
            gmm_expand_scales(dtype, copy.scaling,
                              gmm_prmt(gmm_prmt(step.scale[0], step.scale[1], 0x0040u),
                                       gmm_prmt(step.scale[2], step.scale[3], 0x0040u), 0x5410u), scales);
            scales[3] = gmm_prmt(scales[1], 0u, 0x3232u);
            scales[2] = gmm_prmt(scales[1], 0u, 0x1010u);
            scales[1] = gmm_prmt(scales[0], 0u, 0x3232u);
            scales[0] = gmm_prmt(scales[0], 0u, 0x1010u);
        }
#pragma unroll
        for (i = 0; i < GMM_EXPAND_LINES; i++) {
            uint32_t words[4];
            if (i >= view.count) break;
            gmm_expand_convert8(dtype, copy.dtype, fp4, step.codes[i], words);
#pragma unroll
            for (j = 0; j < 4; j++) words[j] = gmm_mul_16bit_x2(dtype, words[j], scales[mn_major ? j : i]);
            *(uint4 *)(void *)(dst + (int64_t)i * width + c) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

/* A lane's view of 32 rows of a strip of columnwise NV16 tokens: where it loads lines, and where it stores rows. */
typedef struct gmm_expand_strip {
    const uint8_t *data, *scale; /* of line 0 */
    uint16_t *dst;
    int32_t line_stride;         /* bytes of scales between lines, or between 128 lines if they are swizzled */
    /* counted from the first row of the strip: rows that the copy has, rows that are written */
    int32_t valid_rows, rows;
} gmm_expand_strip;

typedef struct gmm_expand_strip_step {
    uint4 codes[GMM_EXPAND_STRIPS];
    uint32_t scale[GMM_EXPAND_STRIPS][2];
} gmm_expand_strip_step;

GMM__DEVICE void gmm_expand_load_strip_step(const gmm_expand_strip strips[GMM_EXPAND_STRIPS], int64_t pitch,
                                            int aligned, int swizzled, int32_t line, gmm_expand_strip_step *step) {
    const int32_t line_offset = swizzled ? line % 32 * 16 + line % 128 / 32 * 4 : 0;
    int strip;
#pragma unroll
    for (strip = 0; strip < GMM_EXPAND_STRIPS; strip++) {
        const uint8_t *const data = strips[strip].data + line * pitch;
        const uint8_t *const scale = strips[strip].scale +
                                     (int64_t)(swizzled ? line / 128 : line) * strips[strip].line_stride + line_offset;
        step->scale[strip][0] = scale[0];
        step->scale[strip][1] = scale[1];
        if (aligned) step->codes[strip] = __ldcs((const uint4 *)(const void *)data);
        else {
            const uint2 low = gmm_expand_load8(0, data, 0), high = gmm_expand_load8(0, data + 8, 0);
            step->codes[strip] = make_uint4(low.x, low.y, high.x, high.y);
        }
    }
}

/* Transposes GMM_EXPAND_STRIPS strips of GMM_GROUP_ROWS padded rows of the tokens through shared memory, for
   GMM_EXPAND_STRIP_LINES lines from `line` on. One CTA. */
GMM__DEVICE void gmm_expand_transposed(const gmm_expand_args *args, const gmm_expand_operand *s, gmm_dtype dtype,
                                       int32_t strip, int32_t line, char *shared) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const int swizzled = s->src.scale_order == GMM_SCALES_SWIZZLED;
    const int32_t lines = s->cols, first = line;
    const int32_t end = lines - line < GMM_EXPAND_STRIP_LINES ? lines : line + GMM_EXPAND_STRIP_LINES;
    /* row and chunk that this thread stores */
    const int32_t row0 = (int32_t)threadIdx.x / 8, chunk = (int32_t)threadIdx.x % 8;
    const int64_t pitch = s->src.ld / 2;
    gmm_expand_strip strips[GMM_EXPAND_STRIPS];
    gmm_expand_strip_step next;
    int32_t g = 0;
    int aligned = pitch % 16 == 0, nth, i, j;
    memset(&next, 0, sizeof next);
#pragma unroll
    for (nth = 0; nth < GMM_EXPAND_STRIPS; nth++) {
        /* where it does not, the last strip is loaded again and not stored */
        const int exists = strip + nth < args->tiles[args->groups];
        gmm_mat copy = s->src;
        gmm__qview v;
        int32_t rows, row;
        gmm_find_group32(args->tiles, args->groups, strip + (exists ? nth : 0), &g);
        rows = (int32_t)(args->offsets[g + 1] - args->offsets[g]);
        row = GMM_GROUP_ROWS * (strip + (exists ? nth : 0) - args->tiles[g]);
        copy.scaling = GMM_SCALING_NV16;
        v = gmm__qview_of(&copy, GMM_COLUMNWISE, 1, g, 0, (int64_t)args->tiles[g] * GMM_GROUP_ROWS, rows, lines);
        aligned &= ((uintptr_t)v.data & 15) == 0;
        strips[nth].data = v.data + row / 2 + 16 * (lane % 4);
        strips[nth].scale = v.scale + gmm__qview_scale(&v, 0, row / 16 + 2 * (lane % 4));
        strips[nth].line_stride = (int32_t)gmm__qview_scale(&v, swizzled ? 128 : 1, 0);
        strips[nth].rows = exists ? (rows + 15) / 16 * 16 - row : 0;
        /* a Hadamard transform spreads the last rows over 16 */
        strips[nth].valid_rows = s->src.hadamard ? strips[nth].rows : rows - row;
        strips[nth].dst = s->dst + (16 * (int64_t)args->blocks16[g] + row + row0) * lines + 8 * chunk;
    }
    /* the first iteration only loads; each of the others loads the next 64 lines before it stores its own */
#pragma unroll 1
    for (line -= 64; line < end; line += 64) {
        const gmm_expand_strip_step step = next;
        uint32_t scales[GMM_EXPAND_STRIPS];
        if (line + 64 < end) {
            const int32_t next_line = line + 64 + 8 * warp + lane / 4;
            gmm_expand_load_strip_step(strips, pitch, aligned, swizzled, next_line < lines ? next_line : lines - 1,
                                       &next);
        }
        if (line < first) continue;
        gmm_expand_scales(dtype, GMM_SCALING_NV16, step.scale[0][0] | step.scale[0][1] << 8 | step.scale[1][0] << 16 |
                          step.scale[1][1] << 24, scales);
#pragma unroll
        for (nth = 0; nth < GMM_EXPAND_STRIPS; nth++)
#pragma unroll
            for (i = 0; i < 4; i++) { /* matrix j of the stmatrix: column 2 q + b is row 32 q + 2 j + b */
                const uint32_t c = (uint32_t)lane % 8, row = 32 * (c / 2) + 2 * (4 * i + (uint32_t)lane / 8) + c % 2;
                const uint32_t scale = gmm_prmt(scales[nth], 0u, i < 2 ? 0x1010u : 0x3232u);
                const uint4 codes = step.codes[nth];
                uint32_t words[4];
                gmm_fp4_to_16bit_x8(dtype, i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w, words);
#pragma unroll
                for (j = 0; j < 4; j++) words[j] = gmm_mul_16bit_x2(dtype, words[j], scale);
                gmm_stmatrix_x4_trans((uint32_t)__cvta_generic_to_shared(shared) + 128 * (GMM_GROUP_ROWS * nth + row) +
                                      (((uint32_t)warp ^ c) << 4), words[0], words[1], words[2], words[3]);
            }
        __syncthreads();
#pragma unroll
        for (nth = 0; nth < GMM_EXPAND_STRIPS; nth++)
#pragma unroll
            for (j = 0; j < 4; j++) {
                const int32_t row = 32 * j + row0;
                uint4 v = make_uint4(0u, 0u, 0u, 0u);
                if (row < strips[nth].valid_rows)
                    v = *(const uint4 *)(const void *)(shared + 128 * (GMM_GROUP_ROWS * nth + row) +
                                                       ((chunk ^ (2 * j + row0 % 2)) << 4));
                if (row < strips[nth].rows && line + 8 * chunk < lines)
                    *(uint4 *)(void *)(strips[nth].dst + j * 32 * (int64_t)lines + line) = v;
            }
        __syncthreads();
    }
#endif
}

/* Writes, once per launch, the alpha of each group's product and the row offsets of groups in transposed copies. */
GMM__DEVICE void gmm_expand_groups(const gmm_expand_args *args) {
    const gmm_mat *a = &args->operand[0].src, *b = &args->operand[1].src;
    /* an amax is encoded as the largest FP4 code times the largest scale */
    const float a_encoded_max = a->scaling != GMM_SCALING_NV16
                         ? 1.0f : 6.0f * (a->flags & (uint32_t)GMM_MAT_E4M3_256 ? 256.0f : 448.0f);
    const float b_encoded_max = 6.0f * (b->flags & (uint32_t)GMM_MAT_E4M3_256 ? 256.0f : 448.0f);
    const float inverse = gmm__fdiv(1.0f, gmm__fmul(a_encoded_max, b_encoded_max));
    int32_t g;
    for (g = (int32_t)threadIdx.x; args->factor && g < args->groups; g += (int32_t)blockDim.x) {
        gmm__scale product = gmm__scale_of(args->alpha ? args->alpha[args->alpha_per_group ? g : 0] : 1.0f);
        if (a->scaling == GMM_SCALING_NV16) product = gmm__scale_times(product, a->amax[g]);
        product = gmm__scale_times(gmm__scale_times(product, b->amax[g]), inverse);
        args->factor[g] = gmm__scale_split(product, &args->factor[args->groups + g]);
    }
    for (g = (int32_t)threadIdx.x; args->ends && g <= args->groups; g += (int32_t)blockDim.x)
        args->ends[g] = 16 * (int64_t)args->blocks16[g];
}

#if GMM__HOLDS(0) && !defined(GMM_NO_QUANT)
/* Dequantizes copies that keep their layout. A task is GMM_EXPAND_LINES lines of GMM_EXPAND_SPAN elements;
   grid-stride loop, one warp per task, first all tasks of operand 0, then those of operand 1. */
GMM__KERNEL __launch_bounds__(GMM_EXPAND_MAX_THREADS, 1) gmm_expand_rows(const __grid_constant__ gmm_expand_args args) {
    enum { LINE_GROUPS = GMM_GROUP_ROWS / GMM_EXPAND_LINES };
    const gmm_expand_format nv16_f16 = { GMM_F16, 0, 1, 0 }, nv16_bf16 = { GMM_BF16, 0, 1, 0 };
    const gmm_expand_format mxfp4_rows = { GMM_BF16, 1, 1, 0 }, mxfp4_columns = { GMM_BF16, 1, 1, 1 };
    const gmm_expand_format mxfp8_rows = { GMM_BF16, 1, 0, 0 }, mxfp8_columns = { GMM_BF16, 1, 0, 1 };
    int32_t task, nth;
    gmm_pdl_wait();
    if (blockIdx.x == 0) gmm_expand_groups(&args);
    task = (int32_t)((blockIdx.x * blockDim.x + threadIdx.x) / 32u);
#pragma unroll 1
    for (nth = 0; nth < 2; nth++) {
        const gmm_expand_operand *s = &args.operand[nth];
        const int mx = s->src.scaling == GMM_SCALING_MX32, columnwise = s->direction == GMM_COLUMNWISE;
        const int transposed = columnwise && !mx, fp4 = s->src.dtype == GMM_E2M1;
        const int32_t width = transposed ? s->rows : s->cols, lines = transposed ? s->cols : s->rows;
        const int32_t spans = (width + GMM_EXPAND_SPAN - 1) / GMM_EXPAND_SPAN;
        const int32_t strips = (lines + GMM_GROUP_ROWS - 1) / GMM_GROUP_ROWS; /* of a matrix */
        const int32_t tasks = LINE_GROUPS * spans * (s->grouped ? args.tiles[args.groups] : args.groups * strips);
        if (s->src.dtype == GMM_NONE) continue;
#pragma unroll 1
        for (; task < tasks; task += (int32_t)(gridDim.x * blockDim.x / 32u)) {
            const int32_t line_group = task / spans, c = (task - line_group * spans) * GMM_EXPAND_SPAN;
            int32_t strip = line_group / LINE_GROUPS, g = 0, line;
            if (s->grouped) {
                gmm_find_group32(args.tiles, args.groups, strip, &g);
                strip -= args.tiles[g];
            } else {
                g = strip / strips;
                strip -= g * strips;
            }
            line = strip * GMM_GROUP_ROWS + line_group % LINE_GROUPS * GMM_EXPAND_LINES;
            if (!mx && args.dtype == GMM_F16) gmm_expand_lines(&args, s, nv16_f16, g, line, c);
            else if (!mx) gmm_expand_lines(&args, s, nv16_bf16, g, line, c);
            else if (columnwise && fp4) gmm_expand_lines(&args, s, mxfp4_columns, g, line, c);
            else if (columnwise) gmm_expand_lines(&args, s, mxfp8_columns, g, line, c);
            else if (fp4) gmm_expand_lines(&args, s, mxfp4_rows, g, line, c);
            else gmm_expand_lines(&args, s, mxfp8_rows, g, line, c);
        }
        task -= tasks;
    }
}

/* Dequantizes and transposes columnwise NV16 tokens. A task is GMM_EXPAND_STRIPS strips by GMM_EXPAND_STRIP_LINES
   lines; grid-stride loop, one CTA per task. */
GMM__KERNEL __launch_bounds__(GMM_EXPAND_TRANSPOSE_THREADS, 4)
gmm_expand_columns(const __grid_constant__ gmm_expand_args args) {
    __shared__ __align__(128) char shared[128 * GMM_GROUP_ROWS * GMM_EXPAND_STRIPS];
    int32_t task = (int32_t)blockIdx.x, strip_groups, nth;
    gmm_pdl_wait();
    strip_groups = (args.tiles[args.groups] + GMM_EXPAND_STRIPS - 1) / GMM_EXPAND_STRIPS;
    if (blockIdx.x == 0) gmm_expand_groups(&args);
#pragma unroll 1
    for (nth = 0; nth < 2; nth++) {
        const gmm_expand_operand *s = &args.operand[nth];
        const int32_t spans = (s->cols + GMM_EXPAND_STRIP_LINES - 1) / GMM_EXPAND_STRIP_LINES;
        const int32_t tasks = strip_groups * spans;
#pragma unroll 1
        for (; task < tasks; task += (int32_t)gridDim.x) {
            const int32_t strip = task / spans * GMM_EXPAND_STRIPS, line = task % spans * GMM_EXPAND_STRIP_LINES;
            if (args.dtype == GMM_F16) gmm_expand_transposed(&args, s, GMM_F16, strip, line, shared);
            else gmm_expand_transposed(&args, s, GMM_BF16, strip, line, shared);
        }
        task -= tasks;
    }
}

/* `columns`: the operands are columnwise NV16 tokens. `limited`: the grid has one CTA per multiprocessor that may be
   used. */
static GMM__UNUSED cudaError_t gmm_launch_expand(int columns, int32_t grid, int limited, int pdl,
                                                 const gmm_expand_args *args, cudaStream_t stream) {
    const int threads = columns ? GMM_EXPAND_TRANSPOSE_THREADS : limited ? GMM_EXPAND_MAX_THREADS : GMM_EXPAND_THREADS;
    return gmm_launch_pdl(columns ? (const void *)gmm_expand_columns : (const void *)gmm_expand_rows, pdl,
                          (unsigned)grid, (unsigned)threads, 0,
                          columns ? GMM__SM_KIB(4, 32768) : GMM__SM_KIB(8, 0), args, stream);
}
#endif

